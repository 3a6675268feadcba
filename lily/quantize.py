"""Affine quantization, bit for bit as ``mx.quantize`` computes it (model_spec §3)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lily.checkpoint import bf16_to_float32
from lily.errors import CheckpointError, UsageError

__all__ = ["BITS", "GROUP_SIZES", "Quantized", "blocks", "float32_to_bf16", "quantize", "to_float32"]

Array: TypeAlias = np.ndarray[Any, Any]

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)

# The smallest magnitude of a scale, before it is divided so that the group's edge gets a whole code.
SMALLEST_SCALE = np.float32(1e-7)

# Of a block that one thread works on: its float32 copy stays in a second-level cache.
BLOCK_WEIGHTS = 1 << 18


class Quantized(NamedTuple):
    """A packed matrix.

    Attributes:
        words: codes, uint32 ``[.., cols * bits / 32]``, low bits first.
        scales: ``[.., cols / group_size]`` in the dtype of the weights; bfloat16 as uint16 bit patterns.
        biases: like ``scales``.
    """

    words: Array
    scales: Array
    biases: Array


def quantize(weights: Array, bits: int, group_size: int, *, name: str = "the matrix") -> Quantized:
    """Quantize a matrix or a stack of them; memory beside the result is a few blocks.

    Args:
        weights: ``[.., rows, cols]``, float32, float16, or bfloat16 as uint16 bit patterns; strided as it may be.
        bits: 4 or 8.
        group_size: weights of a row that share a scale and a bias: 32, 64 or 128; ``cols`` is a multiple of it.
        name: of the tensor, for messages.

    Raises:
        UsageError: bits, group size, shape or dtype is none of the above.
        CheckpointError: a weight is NaN or infinite, or a group's range is beyond float32.
    """
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise UsageError(
            f"can't quantize {name} to {bits} bits in groups of {group_size}; bits are 4 or 8, groups of 32, 64 or 128"
        )
    if weights.dtype not in (np.uint16, np.float16, np.float32):
        raise UsageError(f"can't quantize {name} of {weights.dtype}; expected float32, float16 or bfloat16")
    if weights.ndim < 2 or weights.shape[-1] % group_size:
        raise UsageError(f"can't quantize {name} of shape {list(weights.shape)} in groups of {group_size}")
    *lead, cols = weights.shape
    words = np.empty((*lead, cols * bits // 32), dtype="<u4")
    scales = np.empty((*lead, cols // group_size), dtype=weights.dtype)
    biases = np.empty_like(scales)

    def fill(block: slice) -> None:
        values = to_float32(weights[block]).reshape(-1, group_size)
        codes, scale, bias = _quantize_groups(values, np.float32(2**bits - 1), name)
        words[block] = _pack(codes, bits).reshape(words[block].shape)
        scales[block] = _narrow(scale, weights.dtype).reshape(scales[block].shape)
        biases[block] = _narrow(bias, weights.dtype).reshape(biases[block].shape)

    # numpy lets go of the interpreter inside its loops, so threads run side by side.
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for _ in pool.map(fill, blocks(weights)):
            pass  # an error in a thread is raised here
    finally:
        pool.shutdown(cancel_futures=True)
    return Quantized(words, scales, biases)


def to_float32(values: Array) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A float32 copy of float32, float16, float64, or bfloat16 as uint16 bit patterns."""
    return bf16_to_float32(values) if values.dtype == np.uint16 else values.astype(np.float32)


def float32_to_bf16(values: Array) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Round finite float32 to bfloat16 bit patterns, to nearest, ties to even; beyond its range is infinite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    narrow: np.ndarray[Any, np.dtype[np.uint16]] = rounded.astype(np.uint16)
    return narrow


def blocks(array: Array) -> Iterator[slice]:
    """Slices along the first axis, as many elements each as one thread should work on at a time."""
    step = max(1, BLOCK_WEIGHTS * len(array) // max(array.size, 1))
    return (slice(begin, begin + step) for begin in range(0, len(array), step))


def _quantize_groups(values: Array, largest: np.float32, name: str) -> tuple[Array, Array, Array]:
    """Codes, uint8 like ``values`` ``[groups, group_size]``, and a float32 scale and bias for each group.

    Overwrites ``values``.
    """
    high, low = values.max(axis=1), values.min(axis=1)
    with np.errstate(all="ignore"):
        scale = np.maximum((high - low) / largest, SMALLEST_SCALE)
        # The edge further from zero gets a code that is exact; the scale is negative where that is the upper one.
        lower = np.abs(low) > np.abs(high)
        edge = np.where(lower, low, high)
        scale = np.where(lower, scale, -scale)
        code = np.rint(edge / scale)
        exact = code != 0
        np.divide(edge, code, out=scale, where=exact)
        bias = np.where(exact, edge, np.float32(0))
    # A maximum of anything and NaN is NaN, so the groups tell of their weights.
    usable = np.isfinite(high) & np.isfinite(low)
    if not usable.all():
        raise CheckpointError(f"{name} holds NaN or infinity; it can't be quantized")
    if not (np.isfinite(scale) & (scale != 0)).all():
        raise CheckpointError(f"{name} holds weights of up to {np.abs(edge).max():.3g}; that is too large to quantize")
    values -= bias[:, None]
    values /= scale[:, None]
    np.rint(values, out=values)
    np.clip(values, 0, largest, out=values)
    return values.astype(np.uint8), scale, bias


def _pack(codes: Array, bits: int) -> Array:
    """uint8 codes as little-endian uint32 words, flat."""
    if bits == 4:
        pairs = codes.view("<u2")
        codes = (pairs | pairs >> np.uint16(4)).astype(np.uint8)
    return codes.reshape(-1).view("<u4")


def _narrow(values: Array, dtype: np.dtype[Any]) -> Array:
    return float32_to_bf16(values) if dtype == np.uint16 else values.astype(dtype)
