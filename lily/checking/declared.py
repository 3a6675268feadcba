"""Whether a variant's dispatches touch what they declare, and nothing else.

Barriers and the byte counts of a plan are derived from declared ranges, so a range that is too small is a race that
shows once in a thousand runs. Here each dispatch runs alone, twice, with everything it did not declare to read replaced
by two different patterns. What it writes must be the same both times, and lie inside what it declared to write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lily.checking.memory import POISON, STALE, fill
from lily.checking.problem import Problem
from lily.checking.running import Recording, Runner
from lily.hosts.base import Host
from lily.ops import Tensor
from lily.plan import Access, Dispatch, HostCall, Plan, View

__all__ = ["audit", "misdeclared"]

Bytes = NDArray[np.uint8]


def misdeclared(problem: Problem, recording: Recording) -> str | None:
    """What is wrong with a recording's ranges by themselves: the first fault, or None."""
    named = [*_operand_views(problem), *(("scratch", view) for view in recording.temporaries)]
    outputs = problem.memory.outputs
    legal = [*problem.memory.writable, *recording.temporaries]
    steps = recording.plan.steps
    if not steps:
        return "it recorded no dispatch"
    for step in steps:
        for access in step.accesses:
            if access.view.nbytes == 0:
                continue
            owner = next((name for name, view in named if _contains(view, access.view)), None)
            if owner is None:
                return f"{_title(step)} binds {_range(access.view)}, which is in no one operand and no one scratch view"
            if access.writes and not any(_overlaps(view, access.view) for view in legal):
                return f"{_title(step)} declares that it writes {owner}, which is an input"
    for name, view in named:
        if view in outputs:
            covered = np.zeros(view.nbytes, bool)
            for access in (access for step in steps for access in step.accesses if access.writes):
                _mark(covered, view, access.view)
            if not covered.all():
                count = int(covered.sum())
                return f"its dispatches declare that they write {count} of the {view.nbytes} bytes of {name}"
    return None


def audit(host: Host, problem: Problem, recording: Recording) -> tuple[str | None, dict[int, Bytes]]:
    """Run a recording one dispatch at a time.

    Returns:
        the first fault, or None; and the slots as they are after the last dispatch.
    """
    problem.memory.clear(POISON)
    arena = np.empty(recording.arena_nbytes, np.uint8)
    fill(arena, POISON)
    state = [*(problem.memory.image(slot.index).copy() for slot in problem.memory.slots), arena]
    runner = Runner(host)
    fault = None
    for step in recording.plan.steps:
        fault = fault or _step(runner, step, state)
    runner.close()
    return fault, dict(enumerate(state))


def _step(runner: Runner, step: Dispatch | HostCall, state: list[Bytes]) -> str | None:
    """Run one step on copies, and take what it wrote over into ``state``."""
    readable = _masks(step.accesses, state, lambda access: access.reads)
    writable = _masks(step.accesses, state, lambda access: access.writes)
    everything = set(range(len(state)))
    alone = Plan()
    alone.steps = [step]
    before, after = [], []
    for pattern in (POISON, STALE):
        images = [_hidden(image, mask, pattern) for image, mask in zip(state, readable, strict=True)]
        result = runner.run(alone, images, writes=everything)
        before.append(images)
        after.append([result[index] for index in range(len(state))])
    for slot, (image, mask) in enumerate(zip(state, writable, strict=True)):
        first, second = after[0][slot], after[1][slot]
        # A byte that equals both patterns at once can't be one that was written.
        written = (first != before[0][slot]) | (second != before[1][slot])
        if (outside := written & ~mask).any():
            return (
                f"{_title(step)} wrote byte {int(outside.argmax())} of slot {slot}, which it does not declare to write"
            )
        if (unsteady := written & (first != second)).any():
            return (
                f"{_title(step)} does not give the same byte {int(unsteady.argmax())} of slot {slot} "
                "when memory that it does not declare to read changes"
            )
        image[written] = first[written]
    return None


def _masks(accesses: Sequence[Access], state: list[Bytes], wanted: Callable[[Access], bool]) -> list[NDArray[np.bool_]]:
    masks = [np.zeros(image.nbytes, bool) for image in state]
    for access in accesses:
        if wanted(access):
            view = access.view
            masks[view.slot.index][view.offset : view.offset + view.nbytes] = True
    return masks


def _hidden(image: Bytes, readable: NDArray[np.bool_], pattern: bytes) -> Bytes:
    hidden = np.empty_like(image)
    fill(hidden, pattern)
    hidden[readable] = image[readable]
    return hidden


def _operand_views(problem: Problem) -> list[tuple[str, View]]:
    named: list[tuple[str, View]] = []
    for role, operand in problem.op.operands.items():
        if isinstance(operand, Tensor):
            named.append((role, operand.view))
        else:
            named.append((role, operand.weight))
            named += [(f"{role}'s scales", operand.scales), (f"{role}'s biases", operand.biases)]
    return named


def _contains(outer: View, inner: View) -> bool:
    if outer.slot.index != inner.slot.index:
        return False
    return outer.offset <= inner.offset and inner.offset + inner.nbytes <= outer.offset + outer.nbytes


def _overlaps(one: View, other: View) -> bool:
    if one.slot.index != other.slot.index:
        return False
    return one.offset < other.offset + other.nbytes and other.offset < one.offset + one.nbytes


def _mark(covered: NDArray[np.bool_], whole: View, part: View) -> None:
    if whole.slot.index == part.slot.index:
        start = max(part.offset - whole.offset, 0)
        covered[start : max(part.offset + part.nbytes - whole.offset, 0)] = True


def _title(step: Dispatch | HostCall) -> str:
    return f"the dispatch of {step.kernel}" if isinstance(step, Dispatch) else f"the host call {step.name}"


def _range(view: View) -> str:
    return f"bytes {view.offset} to {view.offset + view.nbytes} of slot {view.slot.name}"
