"""From Hugging Face's layout to MLX's, held against the builders, the specification and MLX-LM's own conversion."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    DEMO,
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    Linear,
    Model,
    Tensor,
    flat,
    huggingface_tensors,
    mlx_tensors,
    random_model,
    read_mlx,
    save,
    tiny_config,
    to_bf16,
    to_f16,
    to_f32,
    write_demo_twin,
)
from commands import lily as run
from safetensors import safe_open

import lily.convert
from lily.checkpoint import Checkpoint
from lily.config import load_config
from lily.convert import convert
from lily.errors import CheckpointError, ConfigError, UsageError
from lily.layout import quantization_section
from lily.output_directory import OutputError
from lily.reference import ReferenceModel
from lily.reference.tensors import read_tensors
from lily.weights import load_weights

# What mlx_lm.convert 0.32.2 (MLX 0.32.4) makes of write_demo_twin: SHA-256 as by `digest`, by bits and group size.
MLX_LM = {
    (4, 64): "6d9046094636722c10d0c0f43a4b1b131f302b89bd0eb57307109f984337539a",
    (8, 32): "b8801ef9dfc1302e8de0d12bef9e54addf5ef72215bb1b962671eff71c15c18d",
}
SOURCE = tiny_config(quantization=None)
DTYPES = {"BF16": to_bf16, "F16": to_f16, "F32": to_f32}


def quantized_config(config: dict[str, Any] = SOURCE) -> dict[str, Any]:
    """What the builders need to know of a conversion with groups of 32."""
    overrides = {
        f"layers.{i}.mlp.{gate}": {"bits": 8, "group_size": 64}
        for i in range(config["text_config"]["num_hidden_layers"])
        for gate in ("gate", "shared_expert_gate")
    }
    return config | {"quantization": {"bits": 4, "group_size": 32} | overrides}


def on_grid(config: dict[str, Any] = SOURCE) -> Model:
    """A random model whose every group uses its whole range of codes, so that quantizing gives back those codes."""
    model = random_model(quantized_config(config))
    for value in model.values():
        if isinstance(value, Linear):
            value.codes[..., ::32], value.codes[..., 1::32] = 0, 2**value.bits - 1
    return model


def source(directory: Path, model: Model | None = None, **options: Any) -> Path:
    """A Hugging Face checkpoint."""
    return save(directory, SOURCE, huggingface_tensors(on_grid() if model is None else model, **options))


def assert_same(one: Model, other: Model) -> None:
    assert one.keys() == other.keys()
    for path, value in one.items():
        expected = other[path]
        if isinstance(value, Linear):
            assert isinstance(expected, Linear), path
            assert value.bits == expected.bits, path
            assert np.array_equal(value.codes, expected.codes), path
            assert np.array_equal(value.scales, expected.scales), path
            assert np.array_equal(value.biases, expected.biases), path
        else:
            assert np.array_equal(value, expected), path


def digest(directory: Path) -> str:
    checkpoint, hashed = Checkpoint.open(directory), hashlib.sha256()
    for name in sorted(checkpoint.tensors):
        info = checkpoint.info(name)
        hashed.update(f"{name} {info.dtype} {list(info.shape)}\n".encode())
        hashed.update(checkpoint.array(name).tobytes())
    return hashed.hexdigest()


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_twin(tmp_path_factory.mktemp("models") / "twin")


@pytest.mark.parametrize(("bits", "group_size"), MLX_LM)
def test_byte_for_byte_what_mlx_lm_writes(twin: Path, tmp_path: Path, bits: int, group_size: int) -> None:
    convert(twin, tmp_path / "out", bits=bits, group_size=group_size)
    assert digest(tmp_path / "out") == MLX_LM[bits, group_size]


def test_the_demo_models_twin(twin: Path, tmp_path: Path) -> None:
    written = convert(twin, tmp_path / "out")
    converted, original, demo = read_mlx(written.path), Checkpoint.open(twin), read_mlx(DEMO)
    dense = read_tensors(twin, json.loads((twin / "config.json").read_text()))
    assert converted.keys() == demo.keys()
    for path, value in converted.items():
        expected = demo[path]
        if not isinstance(value, Linear):
            # linear_attn.norm becomes bfloat16, half a unit of 8 bits off at most; the rest are bit-equal.
            close = path.endswith("linear_attn.norm.weight")
            assert np.allclose(value, expected, rtol=2**-8 if close else 0, atol=0), path
            continue
        assert isinstance(expected, Linear)
        # A weight moves by a step at most, because the far edge of a group gets a code of its own, and by the
        # rounding of the scale to bfloat16, 2^-9 of it for each code.
        step = np.repeat(np.abs(value.scales), value.codes.shape[-1] // value.scales.shape[-1], axis=-1)
        assert (np.abs(value.dense() - dense[path]) <= (1.01 + 2**-9 * value.codes) * step + 1e-6).all(), path
    assert written.parameters == 21_737_520
    assert written.nbytes == sum(info.nbytes for info in Checkpoint.open(written.path).tensors.values())
    assert written.bits_per_weight == pytest.approx(4.5287, abs=1e-4)
    assert original.nbytes > 3.5 * written.nbytes


@pytest.mark.parametrize("apart", [False, True], ids=["fused", "one tensor an expert"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_on_the_grid_come_back_bit_for_bit(tmp_path: Path, dtype: str, apart: bool) -> None:
    model = on_grid()
    source(tmp_path / "in", model, dense=DTYPES[dtype], apart=apart)
    convert(tmp_path / "in", tmp_path / "out", group_size=32)
    assert_same(read_mlx(tmp_path / "out"), model)
    info = Checkpoint.open(tmp_path / "out").info
    # The configuration names no dtype, so it is the embedding's; A_log is float32 in the source and stays so.
    for name in ("embed_tokens.scales", "norm.weight", "layers.0.linear_attn.norm.weight"):
        assert info(f"language_model.model.{name}").dtype == dtype
    assert info("language_model.model.layers.0.linear_attn.A_log").dtype == "F32"


@pytest.mark.parametrize("nested", [True, False])
def test_every_source_gives_the_same_files(tmp_path: Path, nested: bool) -> None:
    model = on_grid()
    config = SOURCE if nested else flat(SOURCE)
    save(tmp_path / "hf", config, huggingface_tensors(model), shards=3)
    save(tmp_path / "no-index", config, huggingface_tensors(model, prefix="model."), shards=2, index=False)
    save(tmp_path / "mlx", config, mlx_tensors(model, quantized=lambda path: False))
    digests = set()
    for name in ("hf", "no-index", "mlx"):
        convert(tmp_path / name, tmp_path / f"{name}-4bit", group_size=32)
        digests.add(digest(tmp_path / f"{name}-4bit"))
    assert len(digests) == 1


def test_the_conversion_computes_what_the_source_does(tmp_path: Path) -> None:
    convert(source(tmp_path / "in"), tmp_path / "out", group_size=32)
    tokens = [1, 5, 2, 7]
    expected, got = (ReferenceModel.load(tmp_path / name).forward(tokens) for name in ("in", "out"))
    # Every weight is equal but linear_attn.norm, which is rounded to bfloat16: 2^-9 of each multiplier at most.
    assert np.allclose(got, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    load_weights(Checkpoint.open(tmp_path / "out"), load_config(tmp_path / "out"))


def test_dtype_of_the_configuration_and_of_the_option(tmp_path: Path) -> None:
    config = SOURCE | {"dtype": "bfloat16"}
    save(tmp_path / "in", config, huggingface_tensors(on_grid(), dense=to_f32))
    for asked, dtype in ((None, "BF16"), ("float16", "F16"), ("float32", "F32")):
        written = convert(tmp_path / "in", tmp_path / f"out-{dtype}", group_size=32, dtype=asked)
        info = Checkpoint.open(written.path).info
        assert info("language_model.lm_head.scales").dtype == dtype
        assert info("language_model.model.layers.1.self_attn.q_norm.weight").dtype == dtype
        assert_same(read_mlx(written.path), on_grid())


def test_norms_are_rounded_as_mlx_rounds_them(tmp_path: Path) -> None:
    """1 + w in the dtype of the source first, then in that of the conversion."""
    model = on_grid()
    tensors = huggingface_tensors(model)
    name = "model.language_model.norm.weight"
    tensors[name] = Tensor("F16", np.linspace(-1, 1, 64).astype(np.float16))
    save(tmp_path / "in", SOURCE | {"dtype": "bfloat16"}, tensors)
    convert(tmp_path / "in", tmp_path / "out", group_size=32)
    added = tensors[name].array + np.float16(1)
    expected = to_bf16(added.astype(np.float32)).array
    assert np.array_equal(Checkpoint.open(tmp_path / "out").array("language_model.model.norm.weight"), expected)


def test_configuration_and_companions(tmp_path: Path) -> None:
    directory = source(tmp_path / "in")
    config = SOURCE | {"rope_scaling": None, "name": "Ø", "vision_config": {"depth": 2}, "_name_or_path": "x"}
    (directory / "config.json").write_text(json.dumps(config))
    companions = {"tokenizer.json": b"{}", "chat_template.jinja": "{{ é }}".encode(), "generation_config.json": b"{ }"}
    for name, content in companions.items():
        (directory / name).write_bytes(content)
    (directory / "README.md").touch()
    convert(directory, tmp_path / "out", group_size=32)
    expected = quantization_section(load_config(directory), 4, 32, 8)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        **SOURCE,
        "rope_scaling": None,
        "name": "Ø",
        "quantization": expected,
        "quantization_config": expected,
    }
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert files.keys() == companions.keys() | {"config.json", "model.safetensors"}
    assert {name: files[name] for name in companions} == companions


def test_shards(tmp_path: Path) -> None:
    source(tmp_path / "in")
    one = convert(tmp_path / "in", tmp_path / "one", group_size=32)
    many = convert(tmp_path / "in", tmp_path / "many", group_size=32, shard_nbytes=10_000)
    assert (one.shards, one.tensors, one.nbytes) == (1, many.tensors, many.nbytes)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{many.shards:05d}.safetensors" for i in range(many.shards)]
    assert many.shards > 3
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": many.nbytes, "total_parameters": many.parameters}
    for file in files:
        with safe_open(tmp_path / "many" / file, framework="numpy") as shard:
            assert shard.metadata() == {"format": "mlx"}
            assert set(shard.keys()) == {name for name, where in index["weight_map"].items() if where == file}
    assert digest(tmp_path / "many") == digest(tmp_path / "one")


def test_vision_and_mtp_tensors_are_left_out_and_counted(tmp_path: Path) -> None:
    tensors = huggingface_tensors(on_grid())
    extra = to_f32(np.ones((4, 4)))
    save(
        tmp_path / "in",
        SOURCE,
        tensors | {"model.visual.a.weight": extra, "model.visual.b.weight": extra, "mtp.fc.weight": extra},
    )
    written = convert(tmp_path / "in", tmp_path / "out", group_size=32)
    assert written.skipped == {"vision": 2, "mtp": 1}
    assert digest(tmp_path / "out") == digest(convert(source(tmp_path / "plain"), tmp_path / "p4", group_size=32).path)


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    config = tiny_config(quantization=None, tie_word_embeddings=True, outer={"tie_word_embeddings": True})
    tensors = huggingface_tensors(on_grid(config))
    save(tmp_path / "without", config, tensors)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    save(tmp_path / "with", config, tensors)
    for name in ("without", "with"):
        convert(tmp_path / name, tmp_path / f"{name}-4bit", group_size=32)
        assert "language_model.lm_head.weight" not in Checkpoint.open(tmp_path / f"{name}-4bit").tensors
    tensors["lm_head.weight"] = to_bf16(np.zeros((96, 64), np.float32))
    save(tmp_path / "different", config, tensors)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' differs from .*tie_word_embeddings is true"):
        convert(tmp_path / "different", tmp_path / "out", group_size=32)


def test_rows_that_make_no_whole_groups_are_kept(tmp_path: Path) -> None:
    written = convert(source(tmp_path / "in"), tmp_path / "out", group_size=64)
    path = "language_model.model.layers.0.mlp.switch_mlp.down_proj"
    assert json.loads((written.path / "config.json").read_text())["quantization"][path] is False
    checkpoint = Checkpoint.open(written.path)
    assert checkpoint.info(f"{path}.weight").dtype == "BF16"
    expected = on_grid()["layers.0.mlp.switch_mlp.down_proj"]
    assert isinstance(expected, Linear)
    assert np.array_equal(checkpoint.float32(f"{path}.weight"), expected.dense())
    load_weights(checkpoint, load_config(written.path))


def test_memory_is_that_of_a_tensor_not_of_the_model(tmp_path: Path) -> None:
    layers = [LINEAR_ATTENTION] * 3 + [FULL_ATTENTION]
    config = tiny_config(
        quantization=None, layer_types=layers * 4, num_hidden_layers=16, num_experts=64, moe_intermediate_size=64
    )
    save(tmp_path / "in", config, huggingface_tensors(random_model(quantized_config(config))))
    largest = 64 * 64 * 64 * 4  # the weights of one projection of all experts, in float32
    tracemalloc.start()
    try:
        written = convert(tmp_path / "in", tmp_path / "out", group_size=32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert Checkpoint.open(tmp_path / "in").nbytes > 20 * largest
    assert Checkpoint.open(written.path).nbytes > 7 * largest
    # One tensor's result and the float32 blocks of it that threads have in hand, and names, and headers.
    assert peak < 6 * largest


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "missing": (
        lambda tensors: tensors.pop("model.language_model.layers.0.mlp.gate.weight") and None,
        r"tensor 'model\.language_model\.layers\.0\.mlp\.gate\.weight' is missing",
    ),
    "superfluous": (
        lambda tensors: tensors.update({"model.extra": to_f32(np.ones(3))}),
        r"tensor 'model\.extra' is not part of the model",
    ),
    "shape": (
        lambda tensors: tensors.update({"lm_head.weight": to_bf16(np.zeros((96, 32)))}),
        r"tensor 'lm_head\.weight' is BF16 \[96, 32\]; expected BF16 \[96, 64\]",
    ),
    "dtype": (
        lambda tensors: tensors.update({"lm_head.weight": Tensor("I8", np.zeros((96, 64), np.int8))}),
        r"tensor 'lm_head\.weight' is I8 \[96, 64\]; expected BF16 or F16 or F32",
    ),
    "NaN": (
        lambda tensors: tensors.update({"lm_head.weight": to_f32(np.full((96, 64), np.nan))}),
        r"model\.safetensors: tensor 'lm_head\.weight' holds NaN or infinity; it can't be",
    ),
    "NaN norm": (
        lambda tensors: tensors.update({"model.language_model.norm.weight": to_f32(np.full(64, np.inf))}),
        r"tensor 'model\.language_model\.norm\.weight' holds NaN or infinity; it can't be converted",
    ),
    "beyond bfloat16": (
        lambda tensors: tensors.update({"lm_head.weight": to_f32(np.full((96, 64), 3.4e38))}),
        r"tensor 'lm_head\.weight' holds 3\.4e\+38, which is beyond BF16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_source_is_refused_and_nothing_is_left(tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    tensors = huggingface_tensors(on_grid())
    change(tensors)
    save(tmp_path / "in", SOURCE | {"dtype": "bfloat16"}, tensors)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "in", tmp_path / "out", group_size=32)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_quantized_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"demo is quantized already \(bits 4, group_size 64\); convert takes"):
        convert("demo", tmp_path / "out")
    config = SOURCE | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}
    save(tmp_path / "fp8", config, huggingface_tensors(on_grid()))
    with pytest.raises(UsageError, match=r"fp8 is quantized already \(quant_method fp8\)"):
        convert(tmp_path / "fp8", tmp_path / "out")


def test_other_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = source(tmp_path / "in")
    with pytest.raises(UsageError, match="in exists already"):
        convert(directory, directory)
    with pytest.raises(UsageError, match="in is the source itself"):
        convert(directory, directory, force=True)
    with pytest.raises(UsageError, match='dtype "int8"; expected bfloat16 or float16 or float32'):
        convert(directory, tmp_path / "out", dtype="int8")
    with pytest.raises(UsageError, match="no model"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
        with pytest.raises(OutputError, match=r"out will take 0\.00 GB, but only 0\.00 GB are free"):
            convert(directory, tmp_path / "out", group_size=32)
    (directory / "config.json").write_text(json.dumps(SOURCE | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match="llama"):
        convert(directory, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("force", [False, True])
def test_ctrl_c_in_the_middle_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    directory = source(tmp_path / "in")
    if force:
        convert(directory, tmp_path / "out", group_size=32)
        before = digest(tmp_path / "out")
    real, calls = lily.convert.quantize, 0

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(lily.convert, "quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(directory, tmp_path / "out", group_size=32, bits=8, force=force)
    assert {path.name for path in tmp_path.iterdir()} == ({"in", "out"} if force else {"in"})
    if force:
        assert digest(tmp_path / "out") == before


def test_the_command_prints_a_line_or_json(tmp_path: Path) -> None:
    tensors = huggingface_tensors(on_grid()) | {"mtp.fc.weight": to_f32(np.ones((2, 2)))}
    save(tmp_path / "in", SOURCE, tensors)
    arguments = ("convert", str(tmp_path / "in"), str(tmp_path / "out"), "--group-size", "32")
    done = run(*arguments)
    assert done.code == 0, done.err
    assert done.err == "Left out: 1 tensor of the multi-token-prediction head.\n"
    assert done.out.startswith(f"{tmp_path / 'out'}: ")
    assert " bits per weight, " in done.out
    refused = run(*arguments)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"lily: {tmp_path / 'out'} exists already; give another name, or --force to replace it\n"
    done = run(*arguments, "--force", "--json", "--shard-size", "20kB", "--bits", "8", "--gate-bits", "4")
    assert (done.code, done.err) == (0, "")
    result = done.json
    assert result.keys() == {
        *("path", "bytes", "tensors", "parameters", "bits_per_weight", "shards", "seconds", "skipped")
    }
    assert result["path"] == str(tmp_path / "out")
    assert result["shards"] > 1
    assert result["skipped"] == {"mtp": 1}
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert section["bits"] == 8
    assert section["language_model.model.layers.0.mlp.gate"]["bits"] == 4


def test_the_command_refuses_odd_sizes_and_explains_itself(tmp_path: Path) -> None:
    done = run("convert", "demo", str(tmp_path / "out"), "--shard-size", "5 apples")
    assert done.code == 2
    assert "'5 apples' is not a size; expected a number of bytes such as 5GB, 500MB or 2GiB" in done.err
    assert "lily convert ~/models/" in run("convert", "--help").out
