"""Weights as operands: a region of a source becomes a view of a slot."""

from __future__ import annotations

from lily.matrix import Matrix, Region, Vector
from lily.memory import Slots
from lily.ops import Tensor, Weight
from lily.plan import View

__all__ = ["Binder"]


class Binder:
    """Gives the operands that ops name for a model's weights."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots.weights

    def weight(self, matrix: Matrix) -> Weight:
        """A matrix, or a stack of them, as stored."""
        weight = self._view(matrix.weight)
        scales, biases = (
            weight.part(0, 0) if region is None else self._view(region) for region in (matrix.scales, matrix.biases)
        )
        return Weight(
            matrix.rows,
            matrix.cols,
            matrix.experts,
            matrix.format,
            matrix.group_size,
            weight,
            scales,
            biases,
            matrix.weight_stride,
            matrix.scale_stride,
            matrix.scale_dtype,
        )

    def vector(self, vector: Vector, *shape: int) -> Tensor:
        """A small float32 tensor, flat unless a shape is given."""
        return Tensor(self._view(vector.region), shape or (vector.size,), "f32")

    def _view(self, region: Region) -> View:
        return View(self._slots[region.source], region.offset, region.nbytes)
