"""Random packed matrices on a workbench, at any byte offset, with their values for an oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily.checking.weights import BF16, F16, F32, WeightFormat
from lily.ops import Weight
from lily.plan import View
from lily.reference import bfloat16_bits, bfloat16_values, dequantize
from tests.kernels.workbench import Workbench

__all__ = ["FORMATS", "Packed", "packed"]

Array = NDArray[np.float64]

FORMATS = (
    *(WeightFormat(kind, group) for kind in ("q4", "q8") for group in (32, 64, 128)),
    *(WeightFormat(kind, 64, "f32") for kind in ("q4", "q8")),
    BF16,
    F16,
    F32,
)


@dataclass(frozen=True)
class Packed:
    """A weight ``[experts,] rows × cols`` and what it holds.

    Attributes:
        values: float64.
        size: of each weight's terms, ``|scale|·code + |bias|`` or ``|w|``: what rounding errors scale with, as kernels
            sum codes and biases apart (model_spec §3).
    """

    weight: Weight
    values: Array
    size: Array

    def product(self, x: Array, expert: int | None = None) -> tuple[Array, Array]:
        """``x @ Wᵀ`` and the sum of its terms' magnitudes."""
        values, size = (self.values, self.size) if expert is None else (self.values[expert], self.size[expert])
        return x @ values.T, np.abs(x) @ size.T


def packed(
    bench: Workbench,
    rng: np.random.Generator,
    shape: tuple[int, ...],
    fmt: WeightFormat,
    *,
    offset: int = 0,
) -> Packed:
    """A matrix or a stack of ``shape``; its parts begin ``offset`` bytes after an aligned place."""

    def place(stored: NDArray[Any]) -> View:
        raw = np.concatenate([np.zeros(offset, np.uint8), stored.reshape(-1).view(np.uint8)])
        return bench.tensor(raw, "u8").view.part(offset, stored.nbytes)

    experts, (rows, cols) = (shape[0] if len(shape) == 3 else 0), shape[-2:]
    count = max(experts, 1)
    if not fmt.group_size:
        plain = rng.normal(size=shape)
        if fmt.format == "bf16":
            bits = bfloat16_bits(plain)
            stored, values = np.asarray(bits), bfloat16_values(bits)
        else:
            stored = plain.astype(np.float16 if fmt.format == "f16" else np.float32)
            values = stored.astype(np.float64)
        view = place(stored)
        empty = view.part(0, 0)
        weight = Weight(rows, cols, experts, fmt.format, 0, view, empty, empty, view.nbytes // count if experts else 0)
        return Packed(weight, values, np.abs(values))
    words = rng.integers(0, 2**32, (*shape[:-1], cols * fmt.bits // 32), np.uint32)
    groups = (*shape[:-1], cols // fmt.group_size)
    # Like a real matrix: a code's share of either sign, and biases that all but cancel the mean.
    scale = rng.choice([-1.0, 1.0], groups) * rng.uniform(0.5, 1.5, groups) / 2**fmt.bits
    bias = -scale * 2**fmt.bits * rng.uniform(0.4, 0.6, groups)
    wide = fmt.scale_dtype == "f32"
    scales, biases = (np.float32(v) if wide else bfloat16_bits(v) for v in (scale, bias))
    word_view, scale_view, bias_view = (place(np.asarray(part)) for part in (words, scales, biases))
    strides = [view.nbytes // count if experts else 0 for view in (word_view, scale_view)]
    values = dequantize(words, scales, biases, fmt.bits, fmt.group_size)
    exact_bias = np.repeat(np.asarray(biases if wide else bfloat16_values(biases), np.float64), fmt.group_size, -1)
    size = np.abs(values - exact_bias) + np.abs(exact_bias)
    matrix = (rows, cols, experts, fmt.format, fmt.group_size)
    weight = Weight(*matrix, word_view, scale_view, bias_view, strides[0], strides[1], fmt.scale_dtype)
    return Packed(weight, values, size)
