"""The meta host: records plans for a shape without memory or a device, so that ``lily plan`` counts on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from lily.errors import HostError
from lily.hosts.base import Buffer, Host, Prepared, Ticket
from lily.plan import Plan

__all__ = ["MetaHost"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class _Size:
    nbytes: int


@dataclass
class _Recorded:
    plan: Plan


class MetaHost(Host):
    """Counts allocations and accepts plans, but runs nothing.

    Args:
        kind: the kind of host whose variants are planned, ``cpu`` or ``metal``.
        activation_dtype: f32 or bf16, as that host would use.
    """

    name = "meta"

    def __init__(self, kind: str = "cpu", activation_dtype: str = "f32") -> None:
        self.kind = kind
        self.activation_dtype = activation_dtype
        self.description = f"no device: plans for {kind} are recorded and counted"
        self._allocated = 0
        self._peak = 0

    def allocate(self, nbytes: int, name: str) -> Buffer:
        self._allocated += nbytes
        self._peak = max(self._peak, self._allocated)
        return _Size(nbytes)

    def bind(self, array: np.ndarray[Any, np.dtype[np.uint8]], name: str) -> Buffer:
        return _Size(array.nbytes)

    def release(self, buffer: Buffer) -> None:
        self._allocated -= buffer.nbytes

    def prepare(self, plan: Plan) -> Prepared:
        return _Recorded(plan)

    def write(self, buffer: Buffer, offset: int, data: Array) -> None:
        self._refuse()

    def read(self, buffer: Buffer, offset: int, dtype: str, count: int) -> Array:
        self._refuse()

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        self._refuse()

    def submit(self, prepared: Prepared, buffers: Sequence[Buffer]) -> Ticket:
        self._refuse()

    def close(self) -> None:
        """Nothing is open."""

    @property
    def allocated_bytes(self) -> int:
        return self._allocated

    @property
    def peak_bytes(self) -> int:
        return self._peak

    @staticmethod
    def _refuse() -> NoReturn:
        raise HostError("the meta host only counts: it has no memory and runs nothing; use --host cpu to run")
