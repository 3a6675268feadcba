"""bfloat16 held as ``uint16`` bit patterns, since numpy has no such type."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["as_float64", "bfloat16_bits", "bfloat16_values", "round_bfloat16"]


def bfloat16_values(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Exact values of bfloat16 bit patterns, any shape."""
    widened = np.asarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        return np.asarray(widened.view(np.float32), dtype=np.float64)


def bfloat16_bits(values: ArrayLike) -> NDArray[np.uint16]:
    """Bit patterns of the nearest bfloat16, ties to even; NaN stays NaN, overflow becomes infinity.

    Values are rounded to float32 first, as every engine does that computes in float32.
    """
    single = np.array(values, dtype=np.float32)
    words = single.view(np.uint32)
    upper = words >> np.uint32(16)
    nearest = (words + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    # The carry of a NaN's payload could reach the sign bit: truncate NaNs and keep them quiet.
    quiet = upper | np.uint32(0x40)
    return np.asarray(np.where(np.isnan(single), quiet, nearest), dtype=np.uint16)


def round_bfloat16(values: ArrayLike) -> NDArray[np.float64]:
    """``values`` rounded to the nearest bfloat16, as float64 of the same shape."""
    return bfloat16_values(bfloat16_bits(values))


def as_float64(values: ArrayLike) -> NDArray[np.float64]:
    """``values`` as float64; an array of ``uint16`` is taken for bfloat16 bit patterns."""
    array = np.asarray(values)
    if array.dtype == np.uint16:
        return bfloat16_values(array)
    return array.astype(np.float64, copy=False)
