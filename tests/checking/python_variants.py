"""Variants of ``linear`` in numpy, as host calls: a right one, and one for each fault that the harness must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from lily.hosts.base import HostMemory
from lily.ops import Op
from lily.plan import Access, Plan, View, read, update, write
from lily.registry import KernelVariant

__all__ = ["FAULTS", "Parts", "python_linear", "right"]

Float = np.ndarray[Any, np.dtype[np.float32]]


def one_float_matrix(op: Op) -> bool:
    return op.weight("w0").format == "f32" and op.shape["parts"] == 1


@dataclass
class Parts:
    """What a host call sees of its op."""

    op: Op
    memory: HostMemory
    scratch: View

    @property
    def x(self) -> Float:
        return self._array(self.op.tensor("x").view).reshape(self.op.tensor("x").shape)

    @property
    def w(self) -> Float:
        weight = self.op.weight("w0")
        return self._array(weight.weight).reshape(weight.rows, weight.cols)

    @property
    def norm(self) -> Float:
        return self._array(self.op.tensor("norm").view)

    @property
    def y(self) -> Float:
        return self._array(self.op.tensor("y0").view).reshape(self.op.tensor("y0").shape)

    @property
    def room(self) -> Float:
        return self._array(self.scratch)

    def beyond(self, view: View, floats: int) -> Float:
        """A view and some floats after it."""
        return self._array(View(view.slot, view.offset, view.nbytes + 4 * floats))

    def _array(self, view: View) -> Float:
        array: Float = self.memory.array(view, "f4")
        return array


def right(p: Parts) -> None:
    x = p.x
    if p.op.has("norm"):
        x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(p.op.params["eps"])) * p.norm
    p.y[:] = x @ p.w.T + (p.y if p.op.params["residual"] else 0)


def declared(op: Op, scratch: View) -> list[Access]:
    norms = [read(op.tensor("norm").view)] if op.has("norm") else []
    y = op.tensor("y0").view
    output = update(y) if op.params["residual"] else write(y)
    return [read(op.tensor("x").view), read(op.weight("w0").weight), *norms, output, write(scratch)]


@dataclass(frozen=True)
class Fault:
    """A way to be wrong: what the host call does, what it declares, and words of the message that must name it."""

    work: Callable[[Parts], None]
    message: str
    accesses: Callable[[Op, View], Sequence[Access]] = declared


def python_linear(
    work: Callable[[Parts], None] = right, accesses: Callable[[Op, View], Sequence[Access]] = declared
) -> KernelVariant:
    """A variant whose only step is a host call."""

    def encode(op: Op, plan: Plan) -> None:
        scratch = plan.scratch(256)
        plan.host_call("product", lambda memory: work(Parts(op, memory, scratch)), accesses(op, scratch))

    return KernelVariant("linear", "python", "cpu", encode, "numpy", accepts=one_float_matrix, requirement="float32")


_calls = count(1)


def _nudge(p: Parts, steps: int) -> None:
    """Move one element by units in the last place: far less than any tolerance."""
    p.y[:1, :1].view(np.int32)[:] += steps


def _wrong_constant(p: Parts) -> None:
    p.y[:] = p.x @ p.w.T * np.float32(1.001)


def _lost_term(p: Parts) -> None:
    p.y[:] = p.x[:, :-1] @ p.w[:, :-1].T


def _transposed_rows(p: Parts) -> None:
    p.y[:] = (p.x @ p.w.T)[:, ::-1]


def _last_row_missing(p: Parts) -> None:
    p.y[:-1] = (p.x @ p.w.T)[:-1]


def _last_element_missing(p: Parts) -> None:
    right_y = p.x @ p.w.T
    p.y.reshape(-1)[:-1] = right_y.reshape(-1)[:-1]


def _writes_past_the_end(p: Parts) -> None:
    right(p)
    p.beyond(p.op.tensor("y0").view, 1)[-1] = 1.0


def _scratch_overrun(p: Parts) -> None:
    right(p)
    p.beyond(p.scratch, 3)[-1] = 1.0


def _reads_past_the_end(p: Parts) -> None:
    right(p)
    p.y[0, 0] += p.beyond(p.op.tensor("x").view, 1)[-1]


def _changes_its_input(p: Parts) -> None:
    right(p)
    p.x[0, 0] += 1.0


def _changes_its_weight(p: Parts) -> None:
    right(p)
    p.w[0, 0] += 1.0


def _depends_on_old_output(p: Parts) -> None:
    stale = p.y[0, 0] > 1e6
    right(p)
    _nudge(p, int(stale))


def _depends_on_old_scratch(p: Parts) -> None:
    stale = p.room[0] > 1e6
    right(p)
    _nudge(p, int(stale))


def _differs_every_time(p: Parts) -> None:
    right(p)
    _nudge(p, next(_calls) % 7)


def _without_x(op: Op, scratch: View) -> list[Access]:
    return [access for access in declared(op, scratch) if access.view != op.tensor("x").view]


def _output_as_read(op: Op, scratch: View) -> list[Access]:
    return [read(op.tensor("x").view), read(op.weight("w0").weight), read(op.tensor("y0").view), write(scratch)]


def _short_output(op: Op, scratch: View) -> list[Access]:
    y = op.tensor("y0").view
    return [read(op.tensor("x").view), read(op.weight("w0").weight), write(y.part(0, y.nbytes - 4)), write(scratch)]


def _half_of_x(op: Op, scratch: View) -> list[Access]:
    x = op.tensor("x").view
    return [read(x.part(0, x.nbytes - 4)), *declared(op, scratch)[1:]]


def _writable_input(op: Op, scratch: View) -> list[Access]:
    return [update(op.tensor("x").view), *declared(op, scratch)[1:]]


def _beyond_operand(op: Op, scratch: View) -> list[Access]:
    x = op.tensor("x").view
    return [read(View(x.slot, x.offset, x.nbytes + 4)), *declared(op, scratch)[1:]]


FAULTS: dict[str, Fault] = {
    "wrong_constant": Fault(_wrong_constant, "but the oracle says"),
    "lost_term": Fault(_lost_term, "but the oracle says"),
    "transposed_rows": Fault(_transposed_rows, "but the oracle says"),
    "last_row_missing": Fault(_last_row_missing, "is NaN"),
    "last_element_missing": Fault(_last_element_missing, "is NaN (the only one)"),
    "writes_past_the_end": Fault(_writes_past_the_end, "it wrote to memory 1 byte past the end of y0"),
    "scratch_overrun": Fault(_scratch_overrun, "past its scratch"),
    "reads_past_the_end": Fault(_reads_past_the_end, "y0[0, 0] is NaN"),
    "changes_its_input": Fault(_changes_its_input, "byte 0 of x"),
    "changes_its_weight": Fault(_changes_its_weight, "no dispatch declares a write"),
    "depends_on_old_output": Fault(_depends_on_old_output, "differs when unwritten memory holds something else"),
    "depends_on_old_scratch": Fault(_depends_on_old_scratch, "differs when unwritten memory holds something else"),
    "differs_every_time": Fault(_differs_every_time, "differs"),
    "undeclared_read": Fault(right, "does not declare to read", _without_x),
    "too_small_a_read": Fault(right, "does not declare to read", _half_of_x),
    "too_small_a_write": Fault(right, "bytes of y0", _short_output),
    "output_as_read": Fault(right, "write 0 of", _output_as_read),
    "writable_input": Fault(right, "which is an input", _writable_input),
    "beyond_operand": Fault(right, "in no one operand", _beyond_operand),
}
