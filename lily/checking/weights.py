"""Random weights in every stored format, and their exact values for the oracles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily.checking.memory import GUARD, Memory
from lily.ops import Weight
from lily.plan import SlotKind, View
from lily.reference import as_float64, bfloat16_bits, dequantize

__all__ = ["BF16", "F16", "F32", "Q4", "Q8", "WeightFormat", "project", "random_pair", "random_weight"]

Array = NDArray[np.float64]
Single = NDArray[np.float32]
Rng = np.random.Generator

_TILE = 1 << 20  # random elements that are repeated to fill a large matrix: drawing each would take seconds
_ROWS_AT_ONCE = 1024  # of a matrix expanded for the oracle, to bound its memory


@dataclass(frozen=True)
class WeightFormat:
    """How a matrix is stored: see :class:`lily.ops.Weight`."""

    format: str
    group_size: int = 0
    scale_dtype: str = "bf16"

    @property
    def bits(self) -> int:
        return {"q4": 4, "q8": 8, "bf16": 16, "f16": 16, "f32": 32}[self.format]

    def __str__(self) -> str:
        group = f"g{self.group_size}" if self.group_size else ""
        return f"{self.format}{group}{'-f32' if self.scale_dtype == 'f32' else ''}"


Q4 = WeightFormat("q4", 64)
Q8 = WeightFormat("q8", 64)
BF16 = WeightFormat("bf16")
F16 = WeightFormat("f16")
F32 = WeightFormat("f32")


def random_weight(memory: Memory, rng: Rng, rows: int, cols: int, fmt: WeightFormat, *, experts: int = 0) -> Weight:
    """A matrix, or a contiguous stack of ``experts``, that keeps the magnitude of what it multiplies."""
    count = max(experts, 1)
    stored = _stored_matrix(rng, count * rows, cols, fmt)
    weight = _place(memory, stored)
    stride = weight.nbytes // count if experts else 0
    if not fmt.group_size:
        empty = weight.part(0, 0)
        return Weight(rows, cols, experts, fmt.format, 0, weight, empty, empty, stride, 0, fmt.scale_dtype)
    scales, biases = _random_scales(rng, count * rows * cols // fmt.group_size, cols, fmt)
    scale, bias = _place(memory, scales), _place(memory, biases)
    scale_stride = scale.nbytes // count if experts else 0
    return Weight(
        rows, cols, experts, fmt.format, fmt.group_size, weight, scale, bias, stride, scale_stride, fmt.scale_dtype
    )


def random_pair(
    memory: Memory, rng: Rng, rows: int, cols: int, fmt: WeightFormat, *, experts: int
) -> tuple[Weight, Weight]:
    """Two stacks; unquantized, an expert's two matrices lie together, as Hugging Face fuses gate and up (spec §2c)."""
    if fmt.group_size:
        gate, up = (random_weight(memory, rng, rows, cols, fmt, experts=experts) for _ in range(2))
        return gate, up
    both = _place(memory, _stored_matrix(rng, 2 * experts * rows, cols, fmt))
    one = both.nbytes // (2 * experts)
    views = (both.part(offset, both.nbytes - one) for offset in (0, one))
    first, second = (
        Weight(rows, cols, experts, fmt.format, 0, view, view.part(0, 0), view.part(0, 0), 2 * one) for view in views
    )
    return first, second


def project(memory: Memory, x: Array, weight: Weight, expert: int = 0) -> tuple[Array, Array]:
    """``x @ Wᵀ`` of one matrix, and the sum of its terms' magnitudes, which is what rounding errors scale with.

    A term of a quantized weight counts as ``(|scale|·code + |bias|)·|x|``: that is what a kernel adds up when it takes
    scale and bias out of the sum (model_spec §3), and near zero weights it is far more than ``|w·x|``.
    """
    sums: list[Array] = []
    magnitudes: list[Array] = []
    absolute = np.abs(x).astype(np.float32)
    for values, magnitude in _dense(memory, weight, expert):
        sums.append(x @ values.T)
        magnitudes.append((absolute @ magnitude.T).astype(np.float64))
    return np.concatenate(sums, axis=1), np.concatenate(magnitudes, axis=1)


def row_values(memory: Memory, weight: Weight, rows: NDArray[np.int64]) -> tuple[Array, Array]:
    """Some rows of a single matrix, and the magnitudes of their terms."""
    pairs = [_dense_rows(memory, weight, 0, slice(row, row + 1)) for row in rows.tolist()]
    return np.concatenate([values for values, _ in pairs]), np.concatenate([unit for _, unit in pairs]).astype(float)


def _dense(memory: Memory, weight: Weight, expert: int) -> Iterator[tuple[Array, Single]]:
    for first in range(0, weight.rows, _ROWS_AT_ONCE):
        yield _dense_rows(memory, weight, expert, slice(first, min(first + _ROWS_AT_ONCE, weight.rows)))


def _dense_rows(memory: Memory, weight: Weight, expert: int, rows: slice) -> tuple[Array, Single]:
    """Values, and the magnitudes of their terms."""
    stored = _matrix_rows(memory, weight, expert, rows)
    if not weight.group_size:
        values = as_float64(stored)
        return values, np.abs(values).astype(np.float32)
    scales = _scale_rows(memory, weight.scales, weight, expert, rows)
    biases = _scale_rows(memory, weight.biases, weight, expert, rows)
    values = dequantize(stored, scales, biases, weight.bits, weight.group_size)
    bias = biases.astype(np.float32)[..., None]
    products = values.astype(np.float32).reshape(*biases.shape, weight.group_size) - bias
    return values, (np.abs(products) + np.abs(bias)).reshape(values.shape)


def _matrix_rows(memory: Memory, weight: Weight, expert: int, rows: slice) -> Any:
    dtype = {"q4": "<u4", "q8": "<u4", "bf16": "<u2", "f16": "<f2", "f32": "<f4"}[weight.format]
    row_nbytes = weight.cols * weight.bits // 8
    start = expert * weight.weight_stride + rows.start * row_nbytes
    raw = memory.bytes_of(weight.weight.part(start, (rows.stop - rows.start) * row_nbytes))
    return raw.view(dtype).reshape(rows.stop - rows.start, -1)


def _scale_rows(memory: Memory, view: View, weight: Weight, expert: int, rows: slice) -> Array:
    dtype = "<u2" if weight.scale_dtype == "bf16" else "<f4"
    row_nbytes = weight.cols // weight.group_size * np.dtype(dtype).itemsize
    start = expert * weight.scale_stride + rows.start * row_nbytes
    raw = memory.bytes_of(view.part(start, (rows.stop - rows.start) * row_nbytes))
    return as_float64(raw.view(dtype).reshape(rows.stop - rows.start, -1))


def _place(memory: Memory, stored: Any) -> View:
    view = memory.place(SlotKind.WEIGHTS, stored.nbytes, skew=memory.skew % GUARD)
    memory.bytes_of(view)[:] = stored.reshape(-1).view(np.uint8)
    return view


def _stored_matrix(rng: Rng, rows: int, cols: int, fmt: WeightFormat) -> Any:
    size = rows * cols
    if fmt.group_size:
        return _repeated(rng.integers(0, 256, min(size * fmt.bits // 8, _TILE), np.uint8), size * fmt.bits // 8)
    values = rng.standard_normal(min(size, _TILE), np.float32) * np.float32(cols**-0.5)
    stored = {"bf16": bfloat16_bits, "f16": np.float16, "f32": np.asarray}[fmt.format](values)  # type: ignore[operator]
    return _repeated(stored, size)


def _random_scales(rng: Rng, groups: int, cols: int, fmt: WeightFormat) -> tuple[Any, Any]:
    """Scales of both signs, and biases that centre the codes' range at about zero: what quantization gives."""
    drawn = min(groups, _TILE)
    levels = 2**fmt.bits - 1
    deviation = levels / 12**0.5  # of a code
    scale = rng.choice([-1.0, 1.0], drawn) * rng.uniform(0.5, 1.5, drawn) * cols**-0.5 / deviation
    bias = -scale * levels * rng.uniform(0.4, 0.6, drawn)
    scales, biases = (bfloat16_bits(v) if fmt.scale_dtype == "bf16" else v.astype(np.float32) for v in (scale, bias))
    return _repeated(scales, groups), _repeated(biases, groups)


def _repeated(values: Any, size: int) -> Any:
    if values.size >= size:
        return values[:size]
    # An odd period: rows and experts that are a power of two long then differ from each other.
    return np.resize(values[: values.size - 1 | 1], size)
