"""The plan: a flat list of dispatches with derived barriers, recorded once and replayed.

A variant declares what every dispatch reads and writes, as byte ranges of *slots*. A slot is a place for a buffer
(a weight shard, a session's state, scratch); which buffer fills it is decided at submission, so one plan serves
many sessions. Barriers are never written by hand: one stands before a dispatch only where its ranges conflict
(read after write, write after read, write after write) with something since the last barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from lily.errors import PluginError

if TYPE_CHECKING:
    from lily.hosts.base import HostMemory

__all__ = [
    "Access",
    "Dispatch",
    "HostCall",
    "Plan",
    "Slot",
    "SlotKind",
    "Stage",
    "Traffic",
    "View",
    "read",
    "update",
    "write",
]


class SlotKind(Enum):
    """What a slot's bytes are, for the byte counts of ``lily plan``."""

    WEIGHTS = "weights"
    STATE = "state"  # recurrent and convolution state of a session
    KV = "kv"
    SCRATCH = "scratch"
    CONTROL = "control"  # step parameters, page table, token ids, logits' mask and counts


@dataclass(frozen=True)
class Slot:
    """A place for one buffer. Slots never alias; ``index`` is the position in the submission's buffer list."""

    index: int
    kind: SlotKind
    name: str


@dataclass(frozen=True)
class View:
    """``nbytes`` bytes of a slot from byte ``offset``."""

    slot: Slot
    offset: int
    nbytes: int

    def part(self, offset: int, nbytes: int) -> View:
        """A range of this view, ``offset`` bytes from its start."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} leave a view of {self.nbytes} bytes")
        return View(self.slot, self.offset + offset, nbytes)


@dataclass(frozen=True)
class Access:
    """One argument of a dispatch.

    ``view`` is what the kernel may touch, and what barriers are derived from. ``moved`` is how many bytes it does
    move, where that is less than the range (a few experts of a stack, the written part of a cache).
    """

    view: View
    reads: bool
    writes: bool
    moved: int


def read(view: View, moved: int | None = None) -> Access:
    """An argument the kernel reads."""
    return Access(view, True, False, view.nbytes if moved is None else moved)


def write(view: View, moved: int | None = None) -> Access:
    """An argument the kernel writes without reading it first."""
    return Access(view, False, True, view.nbytes if moved is None else moved)


def update(view: View, moved: int | None = None) -> Access:
    """An argument the kernel reads and writes."""
    return Access(view, True, True, view.nbytes if moved is None else moved)


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch.

    ``tasks`` is the grid: (x, y, z) in threadgroups on a GPU; on the CPU their product is the number of independent
    tasks. ``threads`` is threads a threadgroup on a GPU; on the CPU ``threads[0]`` is how many tasks a thread takes
    at a time. ``worker_bytes`` is scratch each CPU thread needs, or threadgroup memory on a GPU.
    """

    kernel: str
    accesses: tuple[Access, ...]
    constants: bytes
    tasks: tuple[int, int, int]
    threads: tuple[int, int, int]
    worker_bytes: int
    barrier: bool  # everything before must be finished and visible first


@dataclass(frozen=True)
class HostCall:
    """A pause: the plan waits, the function runs on the CPU over the slots' memory, the plan goes on.

    Only ablations use it (routing on the CPU); a plan without one never returns to the CPU.
    """

    name: str
    function: Callable[[HostMemory], None]
    accesses: tuple[Access, ...]


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written by kind of slot."""

    read: dict[SlotKind, int]
    written: dict[SlotKind, int]

    @staticmethod
    def of(accesses: Iterable[Access]) -> Traffic:
        read_bytes = dict.fromkeys(SlotKind, 0)
        written = dict.fromkeys(SlotKind, 0)
        for access in accesses:
            if access.reads:
                read_bytes[access.view.slot.kind] += access.moved
            if access.writes:
                written[access.view.slot.kind] += access.moved
        return Traffic(read_bytes, written)

    def total(self, kind: SlotKind) -> int:
        return self.read[kind] + self.written[kind]


@dataclass
class Stage:
    """The outstanding ranges since the last barrier, merged by slot."""

    accesses: list[Access] = field(default_factory=list)

    def conflicts(self, access: Access) -> bool:
        view = access.view
        if view.nbytes == 0:
            return False
        for other in self.accesses:
            if other.view.slot.index != view.slot.index or not (access.writes or other.writes):
                continue
            if view.offset < other.view.offset + other.view.nbytes and other.view.offset < view.offset + view.nbytes:
                return True
        return False


@dataclass(frozen=True)
class OpRecord:
    """Which variant wrote which steps of a plan for one op, and the rule that chose it."""

    label: str
    op: str
    variant: str
    rule: str
    options: dict[str, object]
    first: int
    count: int


class Plan:
    """A recorded model step.

    Args:
        serial: put a barrier before every dispatch (a serial encoder, or the debug mode that must give
            bitwise the same output as derived barriers).
        arena: hands out scratch to :meth:`scratch`.
    """

    def __init__(self, *, serial: bool = False, arena: Callable[[int], View] | None = None) -> None:
        self.steps: list[Dispatch | HostCall] = []
        self.ops: list[OpRecord] = []
        self._serial = serial
        self._arena = arena
        self._stage = Stage()

    def dispatch(
        self,
        kernel: str,
        accesses: Sequence[Access],
        *,
        constants: bytes = b"",
        tasks: int | tuple[int, int, int],
        threads: int | tuple[int, int, int] = 1,
        worker_bytes: int = 0,
    ) -> None:
        """Record one launch; the barrier before it is derived here."""
        grid = (tasks, 1, 1) if isinstance(tasks, int) else tasks
        group = (threads, 1, 1) if isinstance(threads, int) else threads
        if min(*grid, *group) < 1:
            raise PluginError(
                f"kernel {kernel} was dispatched with tasks {grid} and threads {group}; each must be 1 or more"
            )
        barrier = bool(self.steps) and (self._serial or any(map(self._stage.conflicts, accesses)))
        if barrier:
            self._stage = Stage()
        self._stage.accesses.extend(access for access in accesses if access.view.nbytes)
        self.steps.append(Dispatch(kernel, tuple(accesses), constants, grid, group, worker_bytes, barrier))

    def scratch(self, nbytes: int) -> View:
        """A temporary of the op being encoded, 64-byte aligned; the recorder that owns the arena sets where it lies."""
        if self._arena is None:
            raise PluginError("this plan has no scratch arena: it was not made by a recorder")
        return self._arena(nbytes)

    def host_call(self, name: str, function: Callable[[HostMemory], None], accesses: Sequence[Access]) -> None:
        """Record a pause in which ``function`` runs on the CPU. Everything before it has finished by then."""
        self.steps.append(HostCall(name, function, tuple(accesses)))
        self._stage = Stage()

    @property
    def dispatches(self) -> list[Dispatch]:
        return [step for step in self.steps if isinstance(step, Dispatch)]

    @property
    def host_calls(self) -> int:
        return sum(isinstance(step, HostCall) for step in self.steps)

    @property
    def stages(self) -> int:
        """Groups of dispatches with nothing to wait for inside; a pause ends one too."""
        count = 0
        fresh = True
        for step in self.steps:
            if isinstance(step, HostCall):
                fresh = True
                continue
            count += fresh or step.barrier
            fresh = False
        return count

    def traffic(self, first: int = 0, count: int | None = None) -> Traffic:
        """Bytes moved by ``count`` steps from ``first``."""
        steps = self.steps[first:] if count is None else self.steps[first : first + count]
        return Traffic.of(access for step in steps for access in step.accesses)

    def extents(self) -> dict[int, int]:
        """For each slot used, how many bytes its buffer must have."""
        need: dict[int, int] = {}
        for step in self.steps:
            for access in step.accesses:
                view = access.view
                need[view.slot.index] = max(need.get(view.slot.index, 0), view.offset + view.nbytes)
        return need
