"""What an output should be, how far a kernel may be off, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BF16_ROUNDING", "SILU_SLOPE", "Expected", "Finding", "compare", "exactly"]

Array = NDArray[np.float64]

BF16_ROUNDING = 2.0**-8
"""Largest relative error of rounding to bfloat16: half a unit in the last of 8 significant bits."""

SILU_SLOPE = 1.1
"""The most by which silu stretches an error."""

_TINY = 1e-30  # below it float32 has few bits left or none, and hosts flush to zero


@dataclass(frozen=True)
class Expected:
    """An output by the oracle.

    Attributes:
        role: of the operand.
        want: the value in float64, or the integers.
        unit: for each element, the magnitude that rounding errors scale with: mostly the sum of the magnitudes of the
            terms that are added up to get it.
        tolerance: how many units the output may be off; 0 for what must be equal.
        rounding: error relative to the value itself that comes on top, from storing it in fewer bits.
        defined: which elements have a meaning at all; all, if None.
    """

    role: str
    want: NDArray[Any]
    unit: Array
    tolerance: float
    rounding: float = 0.0
    defined: NDArray[np.bool_] | None = None


def exactly(role: str, want: NDArray[Any], defined: NDArray[np.bool_] | None = None) -> Expected:
    """An output that must be equal to the last bit."""
    return Expected(role, want, np.ones(()), 0.0, 0.0, defined)


@dataclass(frozen=True)
class Finding:
    """How one output compares: the worst error in units, the tolerance, and where and what it was, if it failed."""

    role: str
    error: float
    tolerance: float
    message: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance

    @property
    def share(self) -> float:
        """The error as a part of the tolerance: up to 1 passes."""
        if self.error == 0:
            return 0.0
        return self.error / self.tolerance if self.tolerance else float("inf")


def compare(got: NDArray[Any], expected: Expected) -> Finding:
    """Hold an output against the oracle's."""
    want, role = expected.want, expected.role
    if got.shape != want.shape:
        raise ValueError(f"{role} has shape {got.shape} but the oracle gives {want.shape}")
    defined = np.ones(want.shape, bool) if expected.defined is None else expected.defined
    missing = np.isnan(got) & defined
    if missing.any():
        place = _place(missing)
        many = f"{int(missing.sum())} of {missing.size} elements" if missing.sum() > 1 else "the only one"
        reason = "never written, or computed from memory that holds no operand"
        return Finding(role, float("inf"), expected.tolerance, f"{role}[{place}] is NaN ({many}): {reason}")
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(got.astype(np.float64) - want)
        excess = np.maximum(off - expected.rounding * np.abs(want), 0.0) / np.maximum(expected.unit, _TINY)
    error = np.where(defined & (got != want), excess, 0.0)
    error = np.where(np.isnan(error), np.inf, error)
    worst = float(error.max(initial=0.0))
    if worst <= expected.tolerance:
        return Finding(role, worst, expected.tolerance)
    at = np.unravel_index(int(error.argmax()), error.shape)
    where = _place(error == error[at])
    count = int((error > expected.tolerance).sum())
    unit = float(np.broadcast_to(expected.unit, want.shape)[at])
    limit = f"at most {expected.tolerance:.1e} of {unit:.3g} is allowed" if expected.tolerance else "it must be equal"
    message = f"{role}[{where}] is {got[at]:.9g} but the oracle says {want[at]:.9g}; {limit}"
    if count > 1:
        message += f" ({count} of {error.size} elements are off)"
    return Finding(role, worst, expected.tolerance, message)


def _place(mask: NDArray[np.bool_]) -> str:
    return ", ".join(map(str, np.unravel_index(int(mask.argmax()), mask.shape)))
