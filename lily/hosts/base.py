"""What every host can do. The engine knows hosts only through this file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from lily.plan import Plan, View

__all__ = ["Buffer", "Host", "HostMemory", "Prepared", "Ticket"]


class Buffer(Protocol):
    """A device allocation or a bound mapping."""

    nbytes: int


class Prepared(Protocol):
    """A plan made ready for one host."""

    plan: Plan


class Ticket(Protocol):
    """One submission in flight."""

    def wait(self, *, interruptible: bool = True) -> None:
        """Block until done; raises HostError if the device failed.

        Args:
            interruptible: Ctrl-C cancels this run and all that is queued, for long prefills. Otherwise it comes
                through when the run is over, so that a short step is never left half done.
        """


class HostMemory(ABC):
    """The CPU's view of a submission's buffers, for host calls."""

    @abstractmethod
    def array(self, view: View, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
        """The view's bytes as a flat array; writes go to the device."""


class Host(ABC):
    """A device and its memory.

    Attributes:
        name: registered name, e.g. ``cpu``.
        kind: which variants it runs (``KernelVariant.host``); differs from name for simulators.
        activation_dtype: f32 or bf16.
        description: the device in words.
    """

    name: str
    kind: str
    activation_dtype: str
    description: str

    @abstractmethod
    def allocate(self, nbytes: int, name: str) -> Buffer:
        """A zeroed buffer; memory may be committed lazily. Raises HostError if there is none."""

    @abstractmethod
    def bind(self, array: np.ndarray[Any, np.dtype[np.uint8]], name: str) -> Buffer:
        """A buffer over an existing mapping, without a copy; the array must stay alive as long as the buffer."""

    @abstractmethod
    def release(self, buffer: Buffer) -> None:
        """Give a buffer back; it must not be in use."""

    @abstractmethod
    def write(self, buffer: Buffer, offset: int, data: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Copy from the CPU to the buffer. The caller keeps it off ranges in flight."""

    @abstractmethod
    def read(self, buffer: Buffer, offset: int, dtype: str, count: int) -> np.ndarray[Any, np.dtype[Any]]:
        """Copy ``count`` elements to the CPU."""

    @abstractmethod
    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        """Copy between buffers, after everything submitted."""

    @abstractmethod
    def prepare(self, plan: Plan) -> Prepared:
        """Resolve kernels and pack the plan. Raises HostError for a kernel this host lacks."""

    @abstractmethod
    def submit(self, prepared: Prepared, buffers: Sequence[Buffer]) -> Ticket:
        """Queue one run with these buffers in the slots; runs are executed in order."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is queued and free everything."""

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes of live allocations, bound mappings not counted."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Highest ``allocated_bytes`` so far."""
