"""What a run left behind, and how far each of its outputs may be off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lily.checking.expected import BF16_ROUNDING, Expected
from lily.checking.memory import Bytes, decode
from lily.checking.problem import Problem
from lily.checking.weights import project
from lily.plan import View

__all__ = ["ONE_ROUNDING", "RECURRENCE", "SUM", "Judge", "Outcome", "Pairs", "fixed", "near", "project_by"]

Array = NDArray[np.float64]

SUM = 1e-6
"""Products added up, and elementwise functions of a few roundings: a few dozen roundings in a row, of either sign."""

RECURRENCE = 2e-6
"""The delta rule over a chunk: errors of one token's update stay in the state for the tokens after it."""

ONE_ROUNDING = 2.0**-23
"""Dequantization: the product and the sum are each rounded once (model_spec §3)."""

BF16_STEPS = 2.0**-7
"""Of any unit, on hosts with bfloat16 activations: inputs of a sum are rounded to 2^-9 of their value each."""


@dataclass(frozen=True)
class Outcome:
    """The slots after a run, by index."""

    problem: Problem
    images: Mapping[int, Bytes]

    def values(self, role: str) -> Any:
        """An operand's elements, float64 or int64."""
        tensor = self.problem.op.tensor(role)
        return decode(self.images[tensor.view.slot.index], tensor)

    def cached(self, role: str) -> Array:
        """``k_cache`` or ``v_cache`` in the order of the tokens."""
        return self.problem.cached(role, self.images[self.problem.op.tensor(role).view.slot.index])

    def bytes_of(self, view: View) -> Bytes:
        """The content of a view."""
        return self.images[view.slot.index][view.offset : view.offset + view.nbytes]


Pairs: TypeAlias = list[tuple[NDArray[Any], Expected]]
"""Outputs, each with what it should be."""

Judge: TypeAlias = Callable[[Outcome], Pairs]
"""Looks at what a run left behind. The oracle was evaluated when it was made, so it judges any number of runs."""


def fixed(*expected: Expected) -> Judge:
    """A judge of outputs that do not depend on what the kernel chose."""
    return lambda outcome: [(outcome.values(item.role), item) for item in expected]


def near(problem: Problem, role: str, want: Array, unit: Array, *, tolerance: float = SUM) -> Expected:
    """An output within ``tolerance`` units; on hosts with bfloat16 activations, within what those round off."""
    tensor = problem.op.tensor(role)
    if problem.memory.activation_dtype == "bf16":
        tolerance = max(tolerance, BF16_STEPS)
    rounding = BF16_ROUNDING if tensor.dtype == "bf16" else 0.0
    return Expected(role, want.reshape(tensor.shape), unit.reshape(tensor.shape), tolerance, rounding)


def project_by(problem: Problem, x: Array, role: str, expert: int = 0) -> tuple[Array, Array]:
    """:func:`lily.checking.weights.project` by the weight's role."""
    return project(problem.memory, x, problem.op.weight(role), expert)
