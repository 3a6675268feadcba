"""Routing: which other choices of experts pass for right."""

from __future__ import annotations

import numpy as np
import pytest

from lily.checking.case import Case
from lily.checking.expected import compare
from lily.checking.memory import array_of
from lily.checking.operands import build
from lily.checking.oracle import judge
from lily.checking.outcome import Outcome
from lily.checking.tables import SMALL_MOE
from lily.checking.weights import Q8


def route_findings(scenario: str, ids: list[int]) -> dict[str, bool]:
    """Whether each output of one routed row passes, if the ids are these and everything else is right."""
    problem = build(Case("moe.route", "decode", {"rows": 1, **SMALL_MOE}, (Q8,), scenario=scenario))
    outcome = Outcome(problem, {slot.index: problem.memory.image(slot.index).copy() for slot in problem.memory.slots})
    verdict = judge(problem)
    array_of(outcome.images[problem.op.tensor("ids").view.slot.index], problem.op.tensor("ids"))[0] = ids
    for _, expected in verdict(outcome):
        if expected.role != "ids":
            tensor = problem.op.tensor(expected.role)
            array_of(outcome.images[tensor.view.slot.index], tensor)[...] = expected.want
    return {expected.role: compare(got, expected).passed for got, expected in verdict(outcome)}


def best_ids() -> list[int]:
    problem = build(Case("moe.route", "decode", {"rows": 1, **SMALL_MOE}, (Q8,)))
    outcome = Outcome(problem, {slot.index: problem.memory.image(slot.index) for slot in problem.memory.slots})
    [want] = [expected.want for _, expected in judge(problem)(outcome) if expected.role == "ids"]
    return [int(expert) for expert in want[0]]


def test_the_best_experts_in_order_pass() -> None:
    assert route_findings("", best_ids()) == {"h": True, "ids": True, "weights": True}


@pytest.mark.parametrize("wrong", ["swapped", "repeated", "another", "unknown", "negative"])
def test_other_experts_do_not_pass(wrong: str) -> None:
    best = best_ids()
    rest = next(expert for expert in range(SMALL_MOE["experts"]) if expert not in best)
    ids = {
        "swapped": best[::-1],
        "repeated": [best[0], best[0]],
        "another": [best[0], rest],
        "unknown": [best[0], SMALL_MOE["experts"]],
        "negative": [best[0], -1],
    }[wrong]
    assert not route_findings("", ids)["ids"]


def test_among_equal_scores_only_the_lowest_ids_pass() -> None:
    assert route_findings("tied", [0, 1])["ids"]
    assert not route_findings("tied", [1, 0])["ids"]
    assert not route_findings("tied", [0, 2])["ids"]


def test_scores_that_float32_can_not_tell_apart_may_swap() -> None:
    from lily.checking.moe import _right_choice

    scores = np.array([[1.0, 3.0, 3.0 + 1e-9, 2.0]])
    slack = np.array([[1e-6]])
    for ids, right in (([1, 2], True), ([2, 1], True), ([2, 3], False), ([3, 2], False)):
        assert _right_choice(scores, np.array([ids]), slack)[0] == right
    assert not _right_choice(scores, np.array([[1, 2]]), np.zeros((1, 1)))[0]
