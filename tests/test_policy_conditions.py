"""Sets of numbers and boxes of them, against plain sets over a small range."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.policy import conditions
from lily.policy.conditions import END, Ints, TooManyPiecesError, remainder

TOP = 12  # the plain sets stop here; spans may end here or never
spans = st.lists(st.tuples(st.integers(0, TOP), st.integers(0, TOP) | st.just(END)), max_size=4)
ints = spans.map(Ints.union)


def plain(values: Ints) -> set[int]:
    return {number for number in range(TOP + 3) if number in values}


@given(ints, ints)
def test_set_operations(left: Ints, right: Ints) -> None:
    assert plain(left & right) == plain(left) & plain(right)
    assert plain(left - right) == plain(left) - plain(right)
    assert bool(left - right) == bool(plain(left) - plain(right))


@given(ints)
def test_spans_are_canonical(values: Ints) -> None:
    assert Ints.union(reversed(values.spans)) == values
    flat = [edge for span in values.spans for edge in span]
    assert flat == sorted(set(flat))  # disjoint and not adjacent


@given(ints)
def test_edges_are_where_membership_changes(values: Ints) -> None:
    changes = {n for n in range(1, TOP + 3) if (n in values) != (n - 1 in values)}
    assert values.edges == changes


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (Ints.span(3, 4), "3"),
        (Ints.span(3, 6), "3..5"),
        (Ints.span(3), "3 and more"),
        (Ints.union([(8, 9), (1, 3)]), "1..2 or 8"),
    ],
)
def test_text(values: Ints, text: str) -> None:
    assert str(values) == text


phases = st.frozensets(st.sampled_from(["prefill", "decode"]), min_size=1)
boxes = st.fixed_dictionaries({}, optional={"phase": phases, "rows": ints, "context": ints, "heads": ints})


@settings(max_examples=60)
@given(st.lists(boxes, max_size=5))
def test_remainder_is_exact(taken: list[conditions.Box]) -> None:
    whole: conditions.Box = {
        "phase": frozenset(["prefill", "decode"]),
        **{key: Ints.span(0) for key in ("rows", "context", "heads")},
    }
    left = remainder(whole, taken)
    for point in product(["prefill", "decode"], (0, 3, TOP), range(TOP + 2), (0, 5)):
        values = dict(zip(whole, point, strict=True))
        in_taken = any(all(values[key] in box[key] for key in box) for box in taken)
        pieces = sum(all(values[key] in box[key] for key in box) for box in left)
        assert pieces == (0 if in_taken else 1)


def test_hopelessly_many_pieces_are_refused() -> None:
    whole = {f"key{index}": Ints.span(0) for index in range(8)}
    taken = [{key: Ints.span(7 * n + i, 9 * n + i + 20) for i, key in enumerate(whole)} for n in range(40)]
    taken += [{key: Ints.span((i * 13 + n * 5) % 300, 400) for i, key in enumerate(whole)} for n in range(40)]
    with pytest.raises(TooManyPiecesError):
        remainder(whole, taken)
