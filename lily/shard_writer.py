"""Writing safetensors shards piece by piece: a checkpoint never has to fit in memory.

The headers follow from names, dtypes and shapes alone, so they are written first and every piece goes to its
place. The format aligns nothing; here the data begins at a page and larger powers of two come first, which puts
every tensor at a multiple of the largest power of two that divides its size, up to a page.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from lily.checkpoint import INDEX_NAME
from lily.shard import NUMPY_DTYPES

__all__ = ["Part", "Shards", "TensorSpec"]

Array: TypeAlias = np.ndarray[Any, Any]
Advance: TypeAlias = Callable[[int, int], None]

PAGE = 4096


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written; ``dtype`` is the format's own name, such as ``"BF16"``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Part:
    """Tensors that are made together and kept in one shard.

    Attributes:
        tensors: what there will be.
        pieces: makes them: names and consecutive pieces of that tensor's bytes, as arrays of any dtype and shape;
            the tensors may take turns.
    """

    tensors: tuple[TensorSpec, ...]
    pieces: Callable[[], Iterable[tuple[str, Array]]]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Shards:
    """A checkpoint's files, planned from its parts: one file if they fit in it, else several and an index.

    Args:
        parts: kept in this order over the shards.
        shard_nbytes: size a shard's tensors may have; a larger part gets a shard of its own.
        parameters: of the model, for the index.
        format: ``"mlx"`` or ``"pt"``, the metadata that tells readers of the layout.
    """

    def __init__(self, parts: Sequence[Part], shard_nbytes: int, parameters: int, format: str) -> None:
        self.parameters = parameters
        self.format = format
        groups: list[list[Part]] = [[]]
        room = shard_nbytes
        for part in parts:
            if part.nbytes > room and groups[-1]:
                groups.append([])
                room = shard_nbytes
            groups[-1].append(part)
            room -= part.nbytes
        total = len(groups)
        names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
        self.files = dict(zip(names if total > 1 else ["model.safetensors"], groups, strict=True))

    @property
    def tensors(self) -> list[TensorSpec]:
        """All tensors."""
        return [tensor for parts in self.files.values() for part in parts for tensor in part.tensors]

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all files, headers and index included."""
        index = len(self._index()) if len(self.files) > 1 else 0
        headers = sum(len(_header(parts, self.format)[0]) for parts in self.files.values())
        return self.tensor_nbytes + headers + index

    def write(self, directory: Path, advance: Advance = lambda nbytes, tensors: None) -> None:
        """Write every file and flush it to the disk.

        Args:
            directory: exists, and holds none of the files.
            advance: told bytes and tensors as they get done.

        Raises:
            OSError: a file can't be written.
        """
        for name, parts in self.files.items():
            with open(directory / name, "xb") as file:
                _write_shard(file, parts, self.format, advance)
                file.flush()
                os.fsync(file.fileno())
        if len(self.files) > 1:
            (directory / INDEX_NAME).write_bytes(self._index())

    def _index(self) -> bytes:
        metadata = {"total_size": self.tensor_nbytes, "total_parameters": self.parameters}
        weight_map = {
            tensor.name: file for file, parts in self.files.items() for part in parts for tensor in part.tensors
        }
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(index, indent=2) + "\n").encode()


def _header(parts: Sequence[Part], format: str) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data, and where in the file each tensor begins."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    tensors.sort(key=lambda tensor: -min(tensor.nbytes & -tensor.nbytes, PAGE))  # stable: else in the parts' order
    header: dict[str, Any] = {"__metadata__": {"format": format}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    start = 8 + len(text)
    offsets = {tensor.name: start + header[tensor.name]["data_offsets"][0] for tensor in tensors}
    return len(text).to_bytes(8, "little") + text, offsets


def _write_shard(file: BinaryIO, parts: Sequence[Part], format: str, advance: Advance) -> None:
    header, places = _header(parts, format)
    file.write(header)
    for part in parts:
        missing = {tensor.name: tensor.nbytes for tensor in part.tensors}
        for name, raw in _raw(part.pieces()):
            missing[name] -= raw.nbytes
            if missing[name] < 0:
                raise AssertionError(f"{-missing[name]} bytes too many were made for {name}")
            file.seek(places[name])
            file.write(raw)
            places[name] += raw.nbytes
            advance(raw.nbytes, 0)
        if any(missing.values()):
            raise AssertionError(f"bytes that were not made: {missing}")
        advance(0, len(part.tensors))


def _raw(pieces: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, memoryview]]:
    for name, piece in pieces:
        yield name, np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
