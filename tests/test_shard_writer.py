"""Shards written piece by piece, read back by the format's own library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from lily.checkpoint import INDEX_NAME, Checkpoint
from lily.shard_writer import PAGE, Part, Shards, TensorSpec

Array = np.ndarray[Any, Any]

DTYPES = {"F32": np.float32, "U32": np.uint32, "F16": np.float16}


def part(**arrays: Array) -> Part:
    """Each tensor in two pieces, the tensors taking turns."""
    names = {np.dtype(numpy): dtype for dtype, numpy in DTYPES.items()}
    specs = tuple(TensorSpec(name, names[array.dtype], array.shape) for name, array in arrays.items())

    def pieces() -> Iterator[tuple[str, Array]]:
        for half in (0, 1):
            for name, array in arrays.items():
                middle = array.size // 3
                yield name, array.reshape(-1)[middle:] if half else array.reshape(-1)[:middle]

    return Part(specs, pieces)


def random(*shape: int, dtype: str = "F32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 1000, shape).astype(DTYPES[dtype])


@st.composite
def models(draw: st.DrawFn) -> list[dict[str, Array]]:
    """Parts of a few tensors of any shape, empty ones and scalars among them."""
    shapes = st.lists(st.integers(0, 9), max_size=3)
    parts = draw(st.lists(st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPES))), min_size=1, max_size=3)))
    return [
        {f"t{i}.{j}": random(*shape, dtype=dtype, seed=10 * i + j) for j, (shape, dtype) in enumerate(tensors)}
        for i, tensors in enumerate(parts)
    ]


@settings(deadline=None, max_examples=40)
@given(models(), st.integers(1, 3000))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, model: list[dict[str, Array]], shard_nbytes: int
) -> None:
    directory = tmp_path_factory.mktemp("shards")
    shards = Shards([part(**arrays) for arrays in model], shard_nbytes, 7, "mlx")
    shards.write(directory)
    expected = {name: array for arrays in model for name, array in arrays.items()}
    read: dict[str, Array] = {}
    for i, file in enumerate(sorted(directory.glob("*.safetensors"))):
        tensors = load_file(file)
        # No larger than asked, unless one part alone is.
        assert sum(array.nbytes for array in tensors.values()) <= shard_nbytes or len({n[:2] for n in tensors}) == 1
        assert not read.keys() & tensors.keys()
        read |= tensors
        total = len(shards.files)
        assert file.name == (f"model-{i + 1:05d}-of-{total:05d}.safetensors" if total > 1 else "model.safetensors")
        with safe_open(file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "mlx"}
    assert read.keys() == expected.keys()
    for name, array in expected.items():
        assert read[name].dtype == array.dtype
        assert np.array_equal(read[name], array)
    assert sum(file.stat().st_size for file in directory.iterdir()) == shards.nbytes
    assert shards.tensor_nbytes == sum(array.nbytes for array in expected.values())


def test_several_shards_have_an_index_and_one_has_none(tmp_path: Path) -> None:
    parts = [part(a=random(10)), part(b=random(20), c=random(4)), part(d=random(100)), part(e=random(2))]
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    Shards(parts, 1000, 136, "mlx").write(tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    Shards(parts, 136, 136, "mlx").write(tmp_path / "many")
    index = json.loads((tmp_path / "many" / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": 544, "total_parameters": 136}
    first, second, third = (f"model-{i}-of-00003.safetensors" for i in ("00001", "00002", "00003"))
    assert index["weight_map"] == {"a": first, "b": first, "c": first, "d": second, "e": third}
    assert set(Checkpoint.open(tmp_path / "many").tensors) == set("abcde")


def test_tensors_are_aligned_as_far_as_their_sizes_allow(tmp_path: Path) -> None:
    sizes = [3, 4096, 1, 24, 2048, 100, 16384]
    shards = Shards([part(**{f"t{size}": random(size)}) for size in sizes], 1 << 20, 0, "mlx")
    shards.write(tmp_path)
    for info in Checkpoint.open(tmp_path).tensors.values():
        assert info.offset % min(info.nbytes & -info.nbytes, PAGE) == 0


def test_progress_adds_up(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    shards = Shards([part(a=random(10), b=random(3)), part(c=random(5))], 30, 18, "mlx")
    shards.write(tmp_path, lambda nbytes, tensors: done.append((nbytes, tensors)))
    assert tuple(map(sum, zip(*done, strict=True))) == (shards.tensor_nbytes, len(shards.tensors)) == (72, 3)


@pytest.mark.parametrize("count", [9, 11])
def test_the_wrong_number_of_bytes_is_never_written_in_silence(tmp_path: Path, count: int) -> None:
    wrong = Part((TensorSpec("a", "F32", (10,)),), lambda: [("a", np.zeros(count, np.float32))])
    with pytest.raises(AssertionError, match="bytes"):
        Shards([wrong], 1000, 10, "mlx").write(tmp_path)
