"""One safetensors file, mapped and validated.

The header is checked here, so that an error can name the tensor, and then by the ``safetensors`` library, which
has the last word on what the format allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from safetensors import SafetensorError, safe_open

from lily.errors import CheckpointError
from lily.json_file import shown

__all__ = ["NUMPY_DTYPES", "Shard", "TensorInfo", "open_shard", "parse_json_object"]

# The library refuses longer headers too; checked first, so that a corrupt length is never allocated.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 32

# How numpy sees each dtype of the format; it has no bfloat16 and no 8-bit floats, so those stay raw integers.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("u1"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dtype: the format's own name, such as ``"BF16"`` or ``"U32"``.
        shard: index into :attr:`Checkpoint.shards`.
        offset: bytes from the beginning of the shard's file; nothing aligns it.
        nbytes: size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """One mapped file; ``buffer`` is the whole of it, uint8 ``[bytes]``, read-only and page-aligned."""

    path: Path
    buffer: np.ndarray[Any, np.dtype[np.uint8]]


def open_shard(file: Path, shard: int) -> tuple[Shard, list[TensorInfo]]:
    """Map one file and check its header.

    Args:
        file: its path.
        shard: its index in the checkpoint, for the tensors' ``shard``.

    Raises:
        CheckpointError: the file is truncated or its header is malformed, names file and, if it is about
            one, tensor.
        OSError: the file can't be read.
    """
    if file.stat().st_size < 8:
        raise CheckpointError(f"{file}: truncated; a safetensors file has at least 8 bytes")
    buffer = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
    infos = _parse_header(buffer, file, shard)
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, ValueError) as error:
        reason = " ".join(str(error).split())  # it quotes names as they are, line breaks included
        raise CheckpointError(f"{file}: not a valid safetensors file: {reason}") from error
    return Shard(file, buffer), infos


def _parse_header(buffer: np.ndarray[Any, np.dtype[np.uint8]], file: Path, shard: int) -> list[TensorInfo]:
    """Every tensor of a file; each must lie inside it, and no two may share a byte."""
    length = int.from_bytes(buffer[:8].tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{file}: the header claims {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
    start = 8 + length
    if start > buffer.size:
        raise CheckpointError(f"{file}: truncated; the header needs {start} bytes, the file has {buffer.size}")
    header = parse_json_object(buffer[8:start].tobytes(), file, "the header")
    header.pop("__metadata__", None)
    infos = sorted(
        (_parse_tensor(name, entry, start, file, shard) for name, entry in header.items()),
        key=lambda info: (info.offset, info.nbytes),
    )
    end, before = start, "the header"
    for info in infos:
        if info.offset < end:
            raise CheckpointError(f"{file}: tensor {info.name!r} overlaps {before}")
        if info.offset + info.nbytes > buffer.size:
            raise CheckpointError(
                f"{file}: truncated; tensor {info.name!r} ends at byte {info.offset + info.nbytes}, "
                f"the file has {buffer.size}"
            )
        end, before = info.offset + info.nbytes, f"tensor {info.name!r}"
    return infos


def _parse_tensor(name: str, entry: object, start: int, file: Path, shard: int) -> TensorInfo:
    where = f"{file}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: the header entry must be an object; found {shown(entry)}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise CheckpointError(f"{where}: dtype {shown(dtype)} is not known; expected one of {', '.join(NUMPY_DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{where}: shape must be a list of at most {MAX_DIMENSIONS} sizes; found {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets must be [begin, end]; found {shown(offsets)}")
    # An empty tensor passes the byte count whatever its other dimensions; numpy still has to index them.
    if math.prod(max(size, 1) for size in shape) > 2**59:
        raise CheckpointError(f"{where}: shape {shown(shape)} is too large")
    nbytes = math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{where}: {dtype} of shape {shown(shape)} takes {nbytes} bytes; "
            f"data_offsets hold {shown(offsets[1] - offsets[0])}"
        )
    return TensorInfo(name, dtype, tuple(shape), shard, start + offsets[0], nbytes)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def parse_json_object(raw: bytes, file: Path, what: str) -> dict[str, Any]:
    """The JSON object in ``raw``, no key of it twice; ``what`` it is goes into the CheckpointError."""

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CheckpointError(f"{file}: {what} has {key!r} twice")
            result[key] = value
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {what} must be a JSON object; found {shown(value)}")
    return value
