"""A CPU host with named tensors, for tests that run ops one after another over the same state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lily import _cpu
from lily.hosts.base import Buffer
from lily.hosts.cpu import CpuHost
from lily.ops import OPS, Op, Operand, Phase, Tensor
from lily.plan import Plan, Slot, SlotKind, View
from lily.reference import bfloat16_bits, bfloat16_values
from lily.registry import KernelVariant

__all__ = ["ISAS", "Workbench", "named", "phase_of"]

ISAS = [name for name, supported in _cpu.isa_names() if supported]
"""Instruction sets that this machine runs; ``LILY_CPU_ISA`` chooses among them."""

_STORED = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8}


def named(variants: list[KernelVariant], op: str, name: str) -> KernelVariant:
    """The variant of ``op`` called ``name``."""
    return next(variant for variant in variants if (variant.op, variant.name) == (op, name))


def phase_of(op: str) -> Phase:
    """The only phase of an op that has one; else prefill."""
    return OPS[op].phases[0]


class Workbench:
    """Every tensor has a slot and a buffer of its own."""

    def __init__(self, threads: int = 2) -> None:
        self.host = CpuHost(threads=threads)
        self.buffers: list[Buffer] = []

    def tensor(self, values: ArrayLike, dtype: str = "f32") -> Tensor:
        """A tensor that holds ``values``, converted to ``dtype``."""
        array = np.asarray(values)
        stored = bfloat16_bits(array) if dtype == "bf16" else array.astype(_STORED[dtype])
        view = self.place(stored.nbytes)
        self.host.write(self.buffers[view.slot.index], 0, stored)
        return Tensor(view, stored.shape, dtype)

    def empty(self, *shape: int) -> Tensor:
        """A float32 tensor of NaN."""
        return self.tensor(np.full(shape, np.nan))

    def write(self, tensor: Tensor, values: ArrayLike) -> None:
        """Replace what a tensor holds (not bf16)."""
        self.host.write(self.buffers[tensor.view.slot.index], 0, np.asarray(values).astype(_STORED[tensor.dtype]))

    def read(self, tensor: Tensor) -> NDArray[Any]:
        """What a tensor holds; bfloat16 as float64."""
        stored = self.host.read(
            self.buffers[tensor.view.slot.index], 0, np.dtype(_STORED[tensor.dtype]).str, tensor.size
        ).reshape(tensor.shape)
        return bfloat16_values(stored) if tensor.dtype == "bf16" else stored

    def run(
        self,
        variant: KernelVariant,
        phase: Phase,
        shape: Mapping[str, int],
        operands: Mapping[str, Operand],
        params: Mapping[str, float] | None = None,
        **options: object,
    ) -> None:
        """Record one op (its shape holds those of ``shape`` that it knows) and run it."""
        spec = OPS[variant.op]
        known = {key: shape[key] for key in spec.shape}
        op = Op(variant.op, phase, "test", known, operands, params or {})
        assert variant.accepts(op)
        plan = Plan(arena=self.place)
        variant.record(op, plan, options)
        self.submit(plan)

    def submit(self, plan: Plan) -> None:
        """Run a plan over the tensors placed so far."""
        self.host.submit(self.host.prepare(plan), self.buffers).wait()

    def close(self) -> None:
        self.host.close()

    def place(self, nbytes: int) -> View:
        """Room in a slot of its own."""
        self.buffers.append(self.host.allocate(nbytes, "test"))
        return View(Slot(len(self.buffers) - 1, SlotKind.SCRATCH, "test"), 0, nbytes)
