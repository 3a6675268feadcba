"""The recorder: turns the model's ops into a plan, one variant of the policy's choice at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from lily.memory import ITEMSIZE, Slots, align
from lily.ops import Op, Tensor
from lily.plan import OpRecord, Plan, View
from lily.registry import KernelVariant

__all__ = ["Choice", "Recorder"]


class Choice(Protocol):
    """A policy's answer for one op."""

    @property
    def variant(self) -> KernelVariant: ...
    @property
    def options(self) -> Mapping[str, object]: ...
    @property
    def source(self) -> str: ...


class Recorder:
    """Records one plan.

    Args:
        choose: the policy's answer to an op.
        serial: a barrier before every dispatch.
    """

    def __init__(self, slots: Slots, choose: Callable[[Op], Choice], activation_dtype: str, *, serial: bool) -> None:
        self.slots = slots
        self.choose = choose
        self.activation_dtype = activation_dtype
        self.plan = Plan(serial=serial, arena=self._temporary)
        self.activation_bytes = 0
        self.temporary_bytes = 0
        self._temporary_cursor = 0
        self._layer_cursor = 0
        self._step_bytes = 0

    def tensor(self, *shape: int, dtype: str | None = None) -> Tensor:
        """Scratch for an activation, valid through the whole plan; all of them come before the first layer's."""
        tensor = self._place(self._step_bytes, shape, dtype)
        self._step_bytes += align(tensor.view.nbytes)
        self.begin_layer()
        return tensor

    def begin_layer(self) -> None:
        """Let :meth:`layer_tensor` hand out the same places again."""
        self._layer_cursor = self._step_bytes

    def layer_tensor(self, *shape: int, dtype: str | None = None) -> Tensor:
        """Scratch for an activation, valid until :meth:`begin_layer`."""
        tensor = self._place(self._layer_cursor, shape, dtype)
        self._layer_cursor += align(tensor.view.nbytes)
        return tensor

    def _place(self, offset: int, shape: tuple[int, ...], dtype: str | None) -> Tensor:
        dtype = dtype or self.activation_dtype
        view = View(self.slots.activations, offset, math.prod(shape) * ITEMSIZE[dtype])
        self.activation_bytes = max(self.activation_bytes, offset + align(view.nbytes))
        return Tensor(view, shape, dtype)

    def emit(self, op: Op, choice: Choice | None = None) -> None:
        """Append what the chosen variant writes for ``op``."""
        choice = choice or self.choose(op)
        first = len(self.plan.steps)
        self._temporary_cursor = 0
        choice.variant.record(op, self.plan, choice.options)
        self.plan.ops.append(
            OpRecord(
                op.label,
                op.name,
                choice.variant.name,
                choice.source,
                dict(choice.options),
                first,
                len(self.plan.steps) - first,
            )
        )

    def _temporary(self, nbytes: int) -> View:
        # Ops follow each other through data dependencies anyway, so their temporaries share one place.
        view = View(self.slots.temporaries, self._temporary_cursor, nbytes)
        self._temporary_cursor += align(nbytes)
        self.temporary_bytes = max(self.temporary_bytes, self._temporary_cursor)
        return view
