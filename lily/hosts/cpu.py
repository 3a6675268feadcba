"""The CPU host: the C++ runtime of kernels/cpu behind the Host interface."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lily import _cpu
from lily.errors import HostError, UsageError
from lily.hosts.base import Buffer, Host, HostMemory, Prepared, Ticket
from lily.machine import available_cores
from lily.packing import pack
from lily.plan import Dispatch, HostCall, Plan, View

__all__ = ["CpuHost", "choose_isa"]

Array = np.ndarray[Any, np.dtype[Any]]


def choose_isa(environ: Mapping[str, str] = os.environ) -> str:
    """The instruction set to run: ``LILY_CPU_ISA`` if set, else the best this processor has.

    Raises:
        UsageError: the variable names one that is unknown, or that this processor lacks.
    """
    sets = _cpu.isa_names()
    usable = [name for name, supported in sets if supported]
    wanted = environ.get("LILY_CPU_ISA")
    if not wanted:
        return usable[0]
    if wanted not in usable:
        known = wanted in [name for name, _ in sets]
        reason = "this processor does not run it" if known else "there is no such instruction set"
        raise UsageError(f"LILY_CPU_ISA is {wanted!r} but {reason}; use one of {', '.join(usable)}")
    return wanted


class _Prepared:
    """A plan's native segments, cut where the plan pauses for a host call."""

    def __init__(self, plan: Plan, runtime: _cpu.CpuRuntime) -> None:
        self.plan = plan
        self.segments: list[_cpu.CpuPlan | HostCall] = []
        run: list[Dispatch] = []
        for step in [*plan.steps, None]:
            if isinstance(step, Dispatch):
                run.append(step)
                continue
            if run:
                missing = sorted({dispatch.kernel for dispatch in run} - set(runtime.kernel_ids))
                if missing:
                    raise HostError(f"the CPU host has no kernel called {missing[0]}")
                self.segments.append(runtime.build(*pack(run, runtime.kernel_ids)))
                run = []
            if step is not None:
                self.segments.append(step)


class _Memory(HostMemory):
    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers

    def array(self, view: View, dtype: str) -> Array:
        return _window(self._buffers[view.slot.index], view.offset, view.nbytes).view(np.dtype(dtype))


class _Ticket:
    def __init__(self, runtime: _cpu.CpuRuntime, ticket: int, keep: object) -> None:
        self._runtime = runtime
        self._ticket = ticket
        self._keep = keep  # plan and buffers must outlive the run

    def wait(self, *, interruptible: bool = True) -> None:
        if self._keep is not None:
            self._runtime.wait(self._ticket, interruptible)
            self._keep = None


class CpuHost(Host):
    """Runs plans on this machine's cores.

    Args:
        threads: worker threads; 0 takes every core this process may use.
        libraries: shared libraries with further kernels (plugins).
    """

    name = "cpu"
    kind = "cpu"
    activation_dtype = "f32"

    def __init__(self, *, threads: int = 0, libraries: Sequence[Path] = ()) -> None:
        self.isa = choose_isa()
        self.threads = threads or available_cores()
        self._runtime = _cpu.CpuRuntime(self.threads, self.isa)
        for library in libraries:
            self._runtime.load_library(library)
        self._allocated = 0
        self._peak = 0
        self.description = f"CPU, {self.threads} thread{'s' * (self.threads > 1)}, {self.isa}"

    def allocate(self, nbytes: int, name: str) -> Buffer:
        memory = _cpu.Memory(nbytes, name)
        self._allocated += nbytes
        self._peak = max(self._peak, self._allocated)
        return memory

    def bind(self, array: np.ndarray[Any, np.dtype[np.uint8]], name: str) -> Buffer:
        return _cpu.Memory(array.nbytes, name, array)

    def release(self, buffer: Buffer) -> None:
        self._allocated -= buffer.nbytes

    def write(self, buffer: Buffer, offset: int, data: Array) -> None:
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        _window(buffer, offset, raw.nbytes)[:] = raw

    def read(self, buffer: Buffer, offset: int, dtype: str, count: int) -> Array:
        size = np.dtype(dtype).itemsize * count
        return np.array(_window(buffer, offset, size)).view(np.dtype(dtype))

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        _window(target, target_offset, nbytes)[:] = _window(source, source_offset, nbytes)

    def prepare(self, plan: Plan) -> Prepared:
        return _Prepared(plan, self._runtime)

    def submit(self, prepared: Prepared, buffers: Sequence[Buffer]) -> Ticket:
        assert isinstance(prepared, _Prepared)
        last: _Ticket | None = None
        for segment in prepared.segments:
            if isinstance(segment, HostCall):
                if last is not None:
                    last.wait()
                segment.function(_Memory(buffers))
            else:
                memory = [_memory(buffer) for buffer in buffers]
                last = _Ticket(self._runtime, self._runtime.submit(segment, memory), (prepared, memory))
        return last or _Ticket(self._runtime, 0, None)

    def close(self) -> None:
        self._runtime.cancel()

    @property
    def allocated_bytes(self) -> int:
        return self._allocated

    @property
    def peak_bytes(self) -> int:
        return self._peak


def _memory(buffer: Buffer) -> _cpu.Memory:
    assert isinstance(buffer, _cpu.Memory), "a buffer of another host"
    return buffer


def _window(buffer: Buffer, offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    view = _memory(buffer).view
    if offset < 0 or offset + nbytes > view.nbytes:
        raise ValueError(f"{nbytes} bytes at {offset} leave a buffer of {view.nbytes} bytes")
    return view[offset : offset + nbytes]
