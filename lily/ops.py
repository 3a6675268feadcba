"""Ops: the units a model step is made of.

An op is the largest unit that some variant fuses, so fusing is a choice of variant and never a change of the
model graph. Every op that is emitted is checked against the table of ops (:mod:`lily.op_table`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from lily.op_table import OPS, OpSpec, Phase
from lily.plan import View

__all__ = ["OPS", "Op", "OpSpec", "Operand", "Phase", "Tensor", "Weight"]


@dataclass(frozen=True)
class Tensor:
    """A dense row-major array in a slot: activations, state, small vectors. ``dtype`` is f32, bf16, i32 or u8."""

    view: View
    shape: tuple[int, ...]
    dtype: str = "f32"

    @property
    def size(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class Weight:
    """A linear layer's matrix as stored, ``[experts,] rows × cols``; rows are outputs (``y = x @ Wᵀ``).

    ``format`` is q4 or q8 (affine groups of ``group_size`` along cols; model_spec §3), bf16, f16 or f32. ``scales``
    and ``biases`` are empty views for the unquantized. Strides are bytes between experts.
    """

    rows: int
    cols: int
    experts: int
    format: str
    group_size: int
    weight: View
    scales: View
    biases: View
    weight_stride: int = 0
    scale_stride: int = 0
    scale_dtype: str = "bf16"

    @property
    def bits(self) -> int:
        return {"q4": 4, "q8": 8, "bf16": 16, "f16": 16, "f32": 32}[self.format]

    def moved(self, experts: int = 1) -> int:
        """Bytes that reading ``experts`` whole matrices moves."""
        weight = self.rows * self.cols * self.bits // 8
        if self.bits >= 16:
            return weight * experts
        groups = self.rows * self.cols // self.group_size
        return (weight + 2 * groups * (2 if self.scale_dtype == "bf16" else 4)) * experts


Operand: TypeAlias = Tensor | Weight


@dataclass(frozen=True)
class Op:
    """One op of one step.

    Attributes:
        name: a key of ``OPS``.
        phase: ``prefill`` (a chunk of rows) or ``decode`` (one row a session).
        label: where in the model, e.g. ``layers.3.out_proj``.
        shape: the workload, the keys of its OpSpec, all ints.
        operands: role to tensor or weight.
        params: role to number.
    """

    name: str
    phase: Phase
    label: str
    shape: Mapping[str, int]
    operands: Mapping[str, Operand]
    params: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = OPS.get(self.name)
        if spec is None:
            raise ValueError(f"no op is called {self.name!r}")
        if self.phase not in spec.phases:
            raise ValueError(f"op {self.name} has no phase {self.phase!r}")
        if set(self.shape) != set(spec.shape):
            raise ValueError(f"op {self.name} has shape keys {sorted(self.shape)}, not {sorted(spec.shape)}")
        required = {role for role in spec.operands if not role.endswith("?")}
        known = {role.rstrip("?") for role in spec.operands}
        if not required <= set(self.operands) <= known:
            raise ValueError(f"op {self.name} has operands {sorted(self.operands)}, not {sorted(spec.operands)}")
        if set(self.params) != set(spec.params):
            raise ValueError(f"op {self.name} has parameters {sorted(self.params)}, not {sorted(spec.params)}")

    def tensor(self, role: str) -> Tensor:
        operand = self.operands[role]
        if not isinstance(operand, Tensor):
            raise TypeError(f"operand {role} of op {self.name} is a weight, not a tensor")
        return operand

    def weight(self, role: str) -> Weight:
        operand = self.operands[role]
        if not isinstance(operand, Weight):
            raise TypeError(f"operand {role} of op {self.name} is a tensor, not a weight")
        return operand

    def has(self, role: str) -> bool:
        return role in self.operands
