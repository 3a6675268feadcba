"""What a run may change, and whether two runs left the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lily.checking.memory import fill
from lily.checking.outcome import Judge, Outcome
from lily.checking.problem import Problem
from lily.checking.running import Recording
from lily.ops import Tensor
from lily.plan import View

__all__ = ["disagreement", "trespass"]

Bytes = NDArray[np.uint8]


def trespass(problem: Problem, recording: Recording, images: Mapping[int, Bytes], stale: bytes) -> str | None:
    """Where a run changed bytes outside the operands it may write; None if nowhere.

    Args:
        images: the slots after a run; outputs in the problem's memory still hold what they did before it.
        stale: the pattern that scratch was filled with.
    """
    for slot in problem.memory.slots:
        before, after = problem.memory.image(slot.index), images[slot.index]
        if after is before:  # bound without a copy, and found unchanged
            continue
        for start, stop in _gaps(problem.memory.writable, slot.index, before.nbytes):
            if not np.array_equal(before[start:stop], after[start:stop]):
                offset = start + int((before[start:stop] != after[start:stop]).argmax())
                return f"it wrote to {_describe(problem, slot.index, offset)}"
    arena = problem.memory.arena_slot.index
    untouched = np.empty(recording.arena_nbytes, np.uint8)
    fill(untouched, stale)
    for start, stop in _gaps(recording.temporaries, arena, recording.arena_nbytes):
        if not np.array_equal(images[arena][start:stop], untouched[start:stop]):
            return f"it wrote past its scratch, near byte {start} of {recording.arena_nbytes}"
    return None


def disagreement(oracle: Judge, one: Outcome, other: Outcome) -> str | None:
    """Where two runs left different bits in what a run writes; None if nowhere.

    Elements without a meaning do not count.
    """
    problem = one.problem
    undefined = {expected.role: ~expected.defined for _, expected in oracle(one) if expected.defined is not None}
    for view in problem.memory.writable:
        left, right = one.bytes_of(view), other.bytes_of(view)
        if np.array_equal(left, right):
            continue
        differs = left != right
        for role, mask in undefined.items():
            if problem.op.tensor(role).view == view:
                differs &= ~np.repeat(mask.reshape(-1), view.nbytes // mask.size)
        if differs.any():
            return _describe(problem, view.slot.index, view.offset + int(differs.argmax()))
    return None


def _gaps(views: Sequence[View], slot: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """The ranges of a slot that no view covers."""
    cursor = 0
    for start, stop in sorted((view.offset, view.offset + view.nbytes) for view in views if view.slot.index == slot):
        if start > cursor:
            yield cursor, start
        cursor = max(cursor, stop)
    if cursor < nbytes:
        yield cursor, nbytes


def _describe(problem: Problem, slot: int, offset: int) -> str:
    """A byte by the operand it lies in or next to."""
    nearest = ""
    best = -1
    for role, operand in problem.op.operands.items():
        views = [operand.view] if isinstance(operand, Tensor) else [operand.weight, operand.scales, operand.biases]
        for view in views:
            if view.slot.index != slot or view.nbytes == 0:
                continue
            if view.offset <= offset < view.offset + view.nbytes:
                return f"byte {offset - view.offset} of {role}"
            away = view.offset - offset if offset < view.offset else offset - view.offset - view.nbytes + 1
            if best < 0 or away < best:
                side = "before the start" if offset < view.offset else "past the end"
                best, nearest = away, f"{away} byte{'s' * (away > 1)} {side} of {role}"
    return f"memory {nearest}" if nearest else f"byte {offset} of slot {slot}"
