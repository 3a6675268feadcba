"""Recording and running one variant on one problem."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily.checking.memory import GUARD, POISON, fill, round_up
from lily.checking.problem import Problem
from lily.hosts.base import Buffer, Host
from lily.plan import Plan, View
from lily.registry import KernelVariant

__all__ = ["Recording", "Runner", "record", "run"]

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Recording:
    """What a variant encoded.

    Attributes:
        temporaries: what it took by ``plan.scratch``.
        arena_nbytes: of the slot they lie in.
    """

    plan: Plan
    temporaries: tuple[View, ...]
    arena_nbytes: int


def record(
    variant: KernelVariant, problem: Problem, options: Mapping[str, object], *, serial: bool = False
) -> Recording:
    """Let a variant encode a problem's op, with fenced temporaries."""
    slot = problem.memory.arena_slot
    temporaries: list[View] = []
    cursor = 0

    def arena(nbytes: int) -> View:
        nonlocal cursor
        view = View(slot, round_up(cursor + GUARD, GUARD), nbytes)
        cursor = view.offset + nbytes
        temporaries.append(view)
        return view

    plan = Plan(serial=serial, arena=arena)
    variant.record(problem.op, plan, options)
    return Recording(plan, tuple(temporaries), cursor + GUARD)


def run(host: Host, problem: Problem, recording: Recording, *, stale: bytes = POISON) -> dict[int, Bytes]:
    """Run a recording on the problem's memory.

    Args:
        stale: a two-byte pattern that outputs and temporaries hold before.

    Returns:
        the content of every slot afterwards, by slot index.
    """
    problem.memory.clear(stale)
    arena = np.empty(recording.arena_nbytes, np.uint8)
    fill(arena, stale)
    images = [problem.memory.image(slot.index) for slot in problem.memory.slots]
    runner = Runner(host)
    try:
        return runner.run(recording.plan, [*images, arena], writes=_written_slots(recording.plan))
    finally:
        runner.close()


def _written_slots(plan: Plan) -> set[int]:
    return {access.view.slot.index for step in plan.steps for access in step.accesses if access.writes}


class Runner:
    """Moves images of slots to a host and back around the runs of plans."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._owned: dict[tuple[int, int], Buffer] = {}

    def close(self) -> None:
        """Free what was allocated."""
        for buffer in self._owned.values():
            self._host.release(buffer)
        self._owned.clear()

    def run(self, plan: Plan, images: Sequence[Bytes], *, writes: set[int]) -> dict[int, Bytes]:
        """Run ``plan`` with copies of ``images`` in its slots.

        Args:
            writes: slots that the plan declares it writes. The others are bound without a copy, as an engine binds
                weights; a write to one of them is still found, by a checksum.

        Returns:
            the slots' content afterwards, by index: for a slot that was only bound, the image itself.
        """
        prepared = self._host.prepare(plan)
        buffers: list[Buffer] = []
        sums = {}
        for index, image in enumerate(images):
            if index in writes:
                buffer = self._buffer(index, image.nbytes)
                self._host.write(buffer, 0, image)
            else:
                buffer = self._host.bind(image, f"check slot {index}")
                sums[index] = checksum(image)
            buffers.append(buffer)
        self._host.submit(prepared, buffers).wait()
        after = {
            index: self._host.read(buffer, 0, "u1", images[index].nbytes) if index in writes else images[index]
            for index, buffer in enumerate(buffers)
        }
        changed = [index for index, before in sums.items() if checksum(images[index]) != before]
        if changed:
            raise UndeclaredWriteError(changed[0])
        return after

    def _buffer(self, index: int, nbytes: int) -> Buffer:
        key = (index, nbytes)
        if key not in self._owned:
            self._owned[key] = self._host.allocate(nbytes, f"check slot {index}")
        return self._owned[key]


class UndeclaredWriteError(Exception):
    """A run changed a slot of which it declared no write."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        super().__init__(f"a kernel wrote to slot {slot}, of which no dispatch declares a write")


def checksum(image: Bytes) -> int:
    """Of all bytes; large images by a sum of words, which takes a tenth of the time and misses no single change."""
    if image.nbytes < 1 << 20:
        return zlib.crc32(image.data)
    whole = image.nbytes // 8 * 8
    total: Any = image[:whole].view(np.uint64).sum(dtype=np.uint64)
    return int(total) ^ zlib.crc32(image[whole:].data)
