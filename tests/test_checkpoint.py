"""Opening safetensors files: what is there is mapped, what is wrong is named, and no bytes bring anything worse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.checkpoint import Checkpoint
from lily.config import parse_config
from lily.errors import CheckpointError
from lily.weights import load_weights
from tests.checkpoints import Tensor, encode, mlx_tensors, random_model, save, tiny_config, to_bf16, to_f16, to_f32

INDEX = "model.safetensors.index.json"

SMALL = {
    "a": to_bf16(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "b": to_f32(np.array([1.5, -2.0])),
    "c": Tensor("U32", np.arange(4, dtype=np.uint32)),
    "visual.d": to_f16(np.ones(3)),
    "mtp.e": to_bf16(np.ones((1, 1))),
}


def header_of(content: bytes) -> dict[str, Any]:
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    return header


def with_header(content: bytes, header: object) -> bytes:
    """The same data behind another header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + int.from_bytes(content[:8], "little") :]


def edited(**entries: Any) -> bytes:
    """SMALL with some header entries changed in part, or dropped where None."""
    content = encode(SMALL)
    header = header_of(content)
    for name, change in entries.items():
        if change is None:
            del header[name]
        elif isinstance(change, dict):
            header[name] = {**header.get(name, {}), **change}
        else:
            header[name] = change
    return with_header(content, header)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(encode(SMALL))
    return file


@pytest.mark.parametrize("align", [1, 8, 64])
def test_views_of_the_mapping(tmp_path: Path, align: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(encode(SMALL, align))
    checkpoint = Checkpoint.open(file)
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    for name, info in checkpoint.tensors.items():
        array = checkpoint.array(name)
        np.testing.assert_array_equal(array, SMALL[name].array)
        assert array.dtype == SMALL[name].array.dtype
        assert np.shares_memory(array, checkpoint.shards[0].buffer)
        assert not array.flags.writeable
        assert (info.dtype, info.shape, info.nbytes) == (SMALL[name].dtype, array.shape, array.nbytes)
        content = file.read_bytes()[info.offset : info.offset + info.nbytes]
        assert content == SMALL[name].array.tobytes()
    assert checkpoint.shards[0].buffer.ctypes.data % 4096 == 0
    assert checkpoint.nbytes == 12 + 8 + 16


def test_float32_of_every_float_dtype(tmp_path: Path) -> None:
    values = np.array([[0.0, -0.0, 1.5], [-2.25, np.inf, 2.0**-120]], dtype=np.float32)
    tensors = {"bf16": to_bf16(values), "f32": to_f32(values), "f64": Tensor("F64", values.astype(np.float64))}
    tensors["f16"] = to_f16(np.array([0.5, -65504.0]))
    tensors["big"] = Tensor("F64", np.array([1e300]))
    tensors["u16"] = Tensor("U16", np.zeros(2, np.uint16))
    (tmp_path / "model.safetensors").write_bytes(encode(tensors, align=1))
    checkpoint = Checkpoint.open(tmp_path)
    for name in ("bf16", "f32", "f64"):
        array = checkpoint.float32(name)
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array.view(np.uint32), values.view(np.uint32))
    np.testing.assert_array_equal(checkpoint.float32("f16"), np.array([0.5, -65504.0], np.float32))
    assert checkpoint.float32("big")[0] == np.inf
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'u16' is U16; expected BF16"):
        checkpoint.float32("u16")


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    tensors = {"empty": to_f32(np.zeros((0, 3))), "scalar": to_f32(np.array(7.0))}
    (tmp_path / "model.safetensors").write_bytes(encode(tensors))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.array("empty").shape == (0, 3)
    assert checkpoint.float32("scalar") == np.float32(7.0)


def test_case_24_vision_and_mtp_keys_are_skipped_and_counted(tmp_path: Path) -> None:
    names = {
        "vision_tower.a": "vision",
        "model.visual.b": "vision",
        "visual.c": "vision",
        "model.vision_tower.d": "vision",
        "mtp.e": "mtp",
        "language_model.mtp.f": "mtp",
        "model.language_model.visualizer": None,
        "layers.0.mtp.g": None,
    }
    (tmp_path / "model.safetensors").write_bytes(encode({name: to_f32(np.ones(1)) for name in names}))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.skipped == {"vision": 4, "mtp": 2}
    assert set(checkpoint.tensors) == {name for name, reason in names.items() if reason is None}


@pytest.mark.parametrize("index", [True, False])
def test_case_24_shards_with_and_without_index(tmp_path: Path, index: bool) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, {}, SMALL, shards=3, index=index))
    assert [shard.path.name for shard in checkpoint.shards] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ][: len(checkpoint.shards)]
    for name in ("a", "b", "c"):
        np.testing.assert_array_equal(checkpoint.array(name), SMALL[name].array)
    assert checkpoint.skipped == {"vision": 1, "mtp": 1}


def test_case_24_a_missing_shard_is_named_with_a_tensor(tmp_path: Path) -> None:
    save(tmp_path, {}, SMALL, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is missing; .* tensor 'c'"):
        Checkpoint.open(tmp_path)


def test_case_24_a_missing_shard_is_named_without_an_index(tmp_path: Path) -> None:
    save(tmp_path, {}, SMALL, shards=3, index=False)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is missing; .* is one of 3"):
        Checkpoint.open(tmp_path)


def test_a_missing_shard_of_skipped_tensors_only_does_no_harm(tmp_path: Path) -> None:
    save(tmp_path, {}, SMALL, shards=5)
    (tmp_path / "model-00005-of-00005.safetensors").unlink()
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert checkpoint.skipped == {"vision": 1, "mtp": 1}


def test_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    save(tmp_path, {}, SMALL, shards=3)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["a"] = "model-00003-of-00003.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: tensor 'a' should be in model-00003-of-00003"):
        Checkpoint.open(tmp_path)


def test_index_that_names_a_tensor_of_no_shard(tmp_path: Path) -> None:
    save(tmp_path, {}, SMALL, shards=3)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"tensor 'ghost' should be in model-00001-of-00003"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("index", [True, False])
def test_a_tensor_in_two_shards(tmp_path: Path, index: bool) -> None:
    save(tmp_path, {}, SMALL, shards=2, index=index)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(encode({**{name: SMALL[name] for name in sorted(SMALL)[2:]}, "a": SMALL["a"]}))
    with pytest.raises(CheckpointError, match=r"'a' is in two shards, .*00001-of-00002.* and .*00002-of-00002"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "'weight_map' must map"),
        (b'{"weight_map": {}}', "'weight_map' must map"),
        (b'{"weight_map": {"a": 3}}', "tensor 'a' must name a file beside the index; found 3"),
        (b'{"weight_map": {"a": "../model.safetensors"}}', "tensor 'a' must name a file beside the index"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "tensor 'a' must name a file beside the index"),
        (b'{"weight_map": {"a": "\\u0000"}}', "tensor 'a' must name a file beside the index"),
        (b'{"weight_map": {"a": ".."}}', r"\.\. is missing"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "has 'a' twice"),
    ],
)
def test_index_that_is_malformed(small: Path, index: bytes, message: str) -> None:
    (small.parent / INDEX).write_bytes(index)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(small.parent)


MALFORMED: list[tuple[str, bytes | Callable[[bytes], bytes], str]] = [
    ("empty", b"", "truncated"),
    ("no length", b"\x01\x02", "truncated"),
    ("length only", (10).to_bytes(8, "little"), "truncated; the header needs 18 bytes, the file has 8"),
    ("huge length", (2**63).to_bytes(8, "little"), "claims 9223372036854775808 bytes"),
    ("not JSON", with_header(encode(SMALL), b"{'a'}"), "header is not valid JSON"),
    ("not UTF-8", with_header(encode(SMALL), b'{"\xff": 1}'), "header is not valid JSON"),
    ("nested deeply", with_header(encode(SMALL), b"[" * 50_000), "header is not valid JSON"),
    ("not an object", with_header(encode(SMALL), b"[1]"), "header must be a JSON object"),
    ("tensor twice", with_header(encode(SMALL), b'{"a": {}, "a": {}}'), "header has 'a' twice"),
    ("truncated data", lambda content: content[:-1], r"truncated; tensor 'mtp\.e' ends at byte \d+, the file has"),
    ("truncated header", lambda content: content[:40], "truncated; the header needs"),
    ("bytes after the last tensor", lambda content: content + b"x", "not a valid safetensors file"),
    ("hole between tensors", edited(b=None), "not a valid safetensors file"),
    ("entry", edited(a=3), "tensor 'a': the header entry must be an object; found 3"),
    ("unknown dtype", edited(a={"dtype": "F7"}), """tensor 'a': dtype "F7" is not known; expected one of"""),
    ("dtype of another type", edited(a={"dtype": ["F32"]}), "tensor 'a': dtype .* is not known"),
    ("other dtype", edited(a={"dtype": "F32"}), r"tensor 'a': F32 of shape \[2, 3\] takes 24 bytes; .* hold 12"),
    ("other shape", edited(a={"shape": [2, 2]}), r"tensor 'a': BF16 of shape \[2, 2\] takes 8 bytes; .* hold 12"),
    ("negative shape", edited(a={"shape": [-2, -3]}), "tensor 'a': shape must be a list"),
    ("fractional shape", edited(a={"shape": [2.0, 3]}), "tensor 'a': shape must be a list"),
    ("boolean shape", edited(a={"shape": [True, 6]}), "tensor 'a': shape must be a list"),
    ("too many dimensions", edited(a={"shape": [1] * 40 + [6]}), "tensor 'a': shape must be a list of at most 32"),
    ("too large a shape", edited(a={"shape": [0, 2**62], "data_offsets": [0, 0]}), "tensor 'a': shape .* too large"),
    ("one offset", edited(a={"data_offsets": [0]}), r"tensor 'a': data_offsets must be \[begin, end\]"),
    ("offsets backwards", edited(a={"data_offsets": [12, 0]}), r"tensor 'a': data_offsets must be \[begin, end\]"),
    ("negative offsets", edited(a={"data_offsets": [-12, 0]}), r"tensor 'a': data_offsets must be \[begin, end\]"),
    ("offsets outside", edited(c={"data_offsets": [4000, 4016]}), "truncated; tensor 'c' ends at byte"),
    ("overlap", edited(c={"data_offsets": [10, 26]}), "tensor '[bc]' overlaps tensor '[abc]'"),
    ("same bytes twice", edited(b={"data_offsets": [0, 8]}), "tensor '[ab]' overlaps tensor '[ab]'"),
]


@pytest.mark.parametrize(("content", "message"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_malformed_files_name_file_and_tensor(
    small: Path, content: bytes | Callable[[bytes], bytes], message: str
) -> None:
    small.write_bytes(content(small.read_bytes()) if callable(content) else content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(small.parent)
    assert str(small) in str(caught.value)


def test_a_missing_tensor_is_named(small: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'nothing' is missing"):
        Checkpoint.open(small).array("nothing")


def test_paths_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file in this directory"):
        Checkpoint.open(tmp_path)
    for path in (tmp_path / "nowhere", "\0", "x" * 5000):
        with pytest.raises(CheckpointError, match=r"no such file|can't read"):
            Checkpoint.open(path)


def test_a_directory_in_place_of_a_shard(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"can't read .*model\.safetensors"):
        Checkpoint.open(tmp_path)


# The fuzzing: bytes and headers of a small but complete model, through to bound weights.

MODEL = encode(mlx_tensors(random_model(tiny_config())))
HEADER_END = 8 + int.from_bytes(MODEL[:8], "little")
CONFIG = parse_config(tiny_config(), "config.json")

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
DTYPES = st.sampled_from(["U32", "BF16", "F16", "F32", "F64", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64"])
# Halves of surrogate pairs included: JSON can spell them, UTF-8 can't.
NAMES = st.text(st.characters(exclude_categories=()), max_size=4)
SIZES = st.lists(st.integers(0, 100), max_size=4)


def check(file: Path) -> None:
    """Open, read and bind; every outcome but success or a CheckpointError fails the test."""
    try:
        checkpoint = Checkpoint.open(file)
        for name in checkpoint.tensors:
            assert checkpoint.array(name).nbytes == checkpoint.tensors[name].nbytes
        weights = load_weights(checkpoint, CONFIG)
    except CheckpointError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert weights.num_parameters > 0
    # Fit to be printed: one line, and no half of a surrogate pair from a name in the file.
    assert "\n" not in refusal
    refusal.encode()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


@given(
    edits=st.lists(
        st.tuples(st.integers(0, HEADER_END) | st.integers(0, len(MODEL) - 1), st.integers(0, 255)), max_size=4
    ),
    end=st.none() | st.integers(0, len(MODEL)) | st.integers(0, HEADER_END),
    tail=st.binary(max_size=3),
)
@settings(max_examples=250, deadline=None)
def test_any_edit_of_bytes(target: Path, edits: list[tuple[int, int]], end: int | None, tail: bytes) -> None:
    content = bytearray(MODEL)
    for position, value in edits:
        content[position] = value
    target.write_bytes(bytes(content[:end]) + tail)
    check(target)


@given(
    edits=st.lists(
        st.tuples(
            st.sampled_from(sorted(header_of(MODEL))) | NAMES,
            st.one_of(
                st.tuples(st.just("dtype"), DTYPES | JSON_VALUES),
                st.tuples(st.just("shape"), SIZES | JSON_VALUES),
                st.tuples(st.just("data_offsets"), SIZES | JSON_VALUES),
                st.tuples(st.sampled_from(["entry", "rename"]), JSON_VALUES),
                st.tuples(st.just("rename"), NAMES),
            ),
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_edit_of_the_header(target: Path, edits: list[tuple[str, tuple[str, Any]]]) -> None:
    header = header_of(MODEL)
    for name, (key, value) in edits:
        entry = header.get(name)
        if key == "rename" and entry is not None:
            header[str(value)] = header.pop(name)
        elif key == "entry" or not isinstance(entry, dict):
            header[name] = value
        else:
            entry[key] = value
    target.write_bytes(with_header(MODEL, header))
    check(target)


@given(st.binary(max_size=64), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_bytes(target: Path, content: bytes, framed: bool) -> None:
    target.write_bytes(len(content).to_bytes(8, "little") + content if framed else content)
    check(target)


@given(
    st.dictionaries(
        st.sampled_from(sorted(SMALL)) | NAMES,
        st.sampled_from(["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json"])
        | NAMES
        | JSON_VALUES,
        max_size=6,
    )
    | JSON_VALUES
)
@settings(max_examples=200, deadline=None)
def test_any_index(tmp_path_factory: pytest.TempPathFactory, weight_map: object) -> None:
    directory = tmp_path_factory.getbasetemp() / "index"
    if not directory.exists():
        save(directory, {}, SMALL, shards=2)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    check(directory)
