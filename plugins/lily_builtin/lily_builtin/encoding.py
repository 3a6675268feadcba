"""How the built-in CPU variants bind operands: one convention for every kernel."""

from __future__ import annotations

from lily.ops import Tensor, Weight
from lily.plan import Access, View, read

__all__ = ["FORMATS", "empty_like", "matrix", "optional"]

FORMATS = {"q4": 0, "q8": 1, "bf16": 2, "f16": 3, "f32": 4}
"""``enum Format`` of kernels/cpu/matrix.h."""


def empty_like(view: View) -> View:
    """No bytes, in the same slot: what fills an argument that a call does not use."""
    return view.part(0, 0)


def optional(tensor: Tensor | None, like: View) -> View:
    """The tensor's view, or an empty one."""
    return empty_like(like) if tensor is None else tensor.view


def matrix(weight: Weight, moved: int | None = None) -> list[Access]:
    """Weight, scales and biases as three arguments; ``moved`` is the bytes read of all three, if not everything."""
    total = weight.weight.nbytes + weight.scales.nbytes + weight.biases.nbytes
    share = 1.0 if moved is None or total == 0 else moved / total
    return [read(view, round(view.nbytes * share)) for view in (weight.weight, weight.scales, weight.biases)]
