"""Plans: derived barriers, counts, and the flat arrays hosts run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lily.errors import PluginError
from lily.packing import BINDING_DTYPE, CONSTANTS_ALIGNMENT, DISPATCH_DTYPE, pack
from lily.plan import (
    Access,
    Plan,
    Slot,
    SlotKind,
    View,
    read,
    update,
    write,
)

A = Slot(0, SlotKind.SCRATCH, "a")
B = Slot(1, SlotKind.WEIGHTS, "b")


def view(start: int, end: int, slot: Slot = A) -> View:
    return View(slot, start, end - start)


def barriers(*steps: list[Access], serial: bool = False) -> list[bool]:
    plan = Plan(serial=serial)
    for accesses in steps:
        plan.dispatch("k", accesses, tasks=1)
    return [dispatch.barrier for dispatch in plan.dispatches]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (write(view(0, 8)), read(view(0, 8)), True),
        (read(view(0, 8)), write(view(0, 8)), True),
        (write(view(0, 8)), write(view(0, 8)), True),
        (read(view(0, 8)), read(view(0, 8)), False),
        (write(view(0, 8)), read(view(7, 9)), True),
        (write(view(0, 8)), read(view(8, 16)), False),
        (update(view(0, 8)), read(view(0, 1)), True),
        (write(view(0, 8)), read(view(0, 8, B)), False),
        (write(view(0, 8)), read(view(4, 4)), False),
    ],
    ids=["raw", "war", "waw", "reads", "one byte", "neighbours", "update", "other slot", "empty"],
)
def test_a_barrier_stands_only_where_ranges_conflict(first: Access, second: Access, expected: bool) -> None:
    assert barriers([first], [second]) == [False, expected]


def test_a_barrier_covers_everything_before_it() -> None:
    a, b = view(0, 8), view(8, 16)
    assert barriers([write(a)], [write(b)], [read(a)], [read(b)]) == [False, False, True, False]


def test_serial_plans_wait_before_every_dispatch() -> None:
    steps = [[read(view(0, 8))]] * 3
    assert barriers(*steps, serial=True) == [False, True, True]


ranges = st.tuples(st.integers(0, 12), st.integers(0, 6), st.sampled_from([read, write, update]))


@given(st.lists(st.lists(ranges, min_size=1, max_size=3), min_size=1, max_size=12))
def test_derived_barriers_are_sufficient_and_each_is_needed(steps: list[list[tuple[int, int, type]]]) -> None:
    """Against the definition, byte by byte."""
    accesses = [[mode(view(start, start + size)) for start, size, mode in step] for step in steps]
    touched = [
        {
            (byte, access.writes)
            for access in step
            for byte in range(access.view.offset, access.view.offset + access.view.nbytes)
        }
        for step in accesses
    ]

    def clash(i: int, j: int) -> bool:
        return any(a == b and (wa or wb) for a, wa in touched[i] for b, wb in touched[j])

    found = barriers(*accesses)
    last = 0
    for j in range(1, len(steps)):
        needed = any(clash(i, j) for i in range(last, j))
        assert found[j] == needed
        if needed:
            last = j


def test_counts_of_stages_traffic_and_extents() -> None:
    plan = Plan()
    plan.dispatch("k", [read(view(0, 100, B), 40), write(view(0, 8))], tasks=1)
    plan.dispatch("k", [read(view(0, 8)), write(view(8, 16))], tasks=(2, 3, 1))
    plan.host_call("pause", lambda memory: None, [read(view(8, 16))])
    plan.dispatch("k", [update(view(8, 16))], tasks=1)
    assert (len(plan.dispatches), plan.stages, plan.host_calls) == (3, 3, 1)
    traffic = plan.traffic()
    assert traffic.read[SlotKind.WEIGHTS] == 40
    assert traffic.read[SlotKind.SCRATCH] == 8 + 8 + 8
    assert traffic.written[SlotKind.SCRATCH] == 8 + 8 + 8
    assert plan.traffic(0, 1).total(SlotKind.SCRATCH) == 8
    assert plan.extents() == {0: 16, 1: 100}


def test_packed_arrays_hold_what_was_recorded() -> None:
    plan = Plan()
    plan.dispatch("first", [read(view(4, 12, B)), write(view(0, 8))], constants=b"abc", tasks=5, threads=2)
    plan.dispatch("second", [update(view(0, 8))], constants=b"defg", tasks=(1, 2, 3), worker_bytes=64)
    rows, bindings, constants = pack(plan.dispatches, {"first": 7, "second": 9})
    assert rows.dtype == DISPATCH_DTYPE
    assert bindings.dtype == BINDING_DTYPE
    assert rows["kernel"].tolist() == [7, 9]
    assert rows["tasks"].tolist() == [[5, 1, 1], [1, 2, 3]]
    assert rows["barrier"].tolist() == [0, 1]
    assert bindings.tolist() == [(1, 1, 4, 8), (0, 2, 0, 8), (0, 3, 0, 8)]
    offset = rows["constants_offset"][1]
    assert offset % CONSTANTS_ALIGNMENT == 0
    assert bytes(constants[offset : offset + 4]) == b"defg"


def test_views_do_not_leave_their_parent() -> None:
    assert view(8, 24).part(4, 12) == view(12, 24)
    with pytest.raises(ValueError, match="leave a view"):
        view(8, 24).part(8, 9)


def test_a_dispatch_without_tasks_is_refused() -> None:
    with pytest.raises(PluginError, match="must be 1 or more"):
        Plan().dispatch("k", [], tasks=0)


def test_scratch_needs_an_arena() -> None:
    with pytest.raises(PluginError, match="no scratch arena"):
        Plan().scratch(64)
