"""The sampler's judge: one token is right, in greedy as in random draws, and everything it leaves behind is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lily.checking.case import Case
from lily.checking.expected import compare
from lily.checking.memory import array_of
from lily.checking.operands import build
from lily.checking.oracle import judge
from lily.checking.outcome import Outcome
from lily.checking.problem import Problem
from lily.checking.samplers import SCENARIOS
from lily.step import RING, STEP_DTYPE

VOCAB = 64


def problem_of(scenario: str) -> Problem:
    return build(Case("sample", "decode", {"vocab": VOCAB, "advance": 3}, scenario=scenario))


def drawn(problem: Problem, token: int, **wrong: int) -> Outcome:
    """What a kernel leaves that drew ``token``, but for the fields of the step that are ``wrong``."""
    outcome = Outcome(problem, {slot.index: problem.memory.image(slot.index).copy() for slot in problem.memory.slots})
    counts, words = (problem.op.tensor(role) for role in ("counts", "step"))
    array_of(outcome.images[counts.view.slot.index], counts)[:, token] += 1
    stored = array_of(outcome.images[words.view.slot.index], words)
    step: Any = stored.view(STEP_DTYPE)[0].copy()
    step["ring"][int(step["count"]) % RING] = token
    step["position"] += 3
    step["count"] += 1
    step["token"] = token
    for field, value in wrong.items():
        step[field] = value
    stored[:] = np.array([step]).view(np.int32)
    return outcome


def right_tokens(problem: Problem) -> list[int]:
    verdict = judge(problem)
    return [
        token
        for token in range(VOCAB)
        if all(compare(got, expected).passed for got, expected in verdict(drawn(problem, token)))
    ]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_exactly_one_token_is_right(scenario: str) -> None:
    problem = problem_of(scenario)
    [token] = right_tokens(problem)
    assert problem.values("mask")[token] == 1


def test_greedy_takes_the_largest_logit_that_has_a_token() -> None:
    problem = problem_of("greedy")
    allowed = np.where(problem.values("mask") != 0, problem.values("logits"), -np.inf)
    assert right_tokens(problem) == [int(allowed.argmax())]
    assert int(problem.values("logits").argmax()) != int(allowed.argmax())


@pytest.mark.parametrize(("field", "value"), [("position", 0), ("count", 0), ("top_k", 3), ("seed_low", 1)])
def test_a_step_left_wrong_does_not_pass(field: str, value: int) -> None:
    problem = problem_of("greedy")
    [token] = right_tokens(problem)
    findings = [compare(*pair) for pair in judge(problem)(drawn(problem, token, **{field: value}))]
    assert [finding.role for finding in findings if not finding.passed] == ["step"]


def test_counts_left_wrong_do_not_pass() -> None:
    problem = problem_of("greedy")
    [token] = right_tokens(problem)
    outcome = drawn(problem, token)
    counts = problem.op.tensor("counts")
    array_of(outcome.images[counts.view.slot.index], counts)[1, token] -= 1
    findings = [compare(*pair) for pair in judge(problem)(outcome)]
    assert [finding.role for finding in findings if not finding.passed] == ["counts"]


def test_draws_over_many_seeds_follow_the_distribution() -> None:
    """The right tokens of 400 draws against their probabilities: chi-square below its 99.9 % point for the ids left."""
    from lily.checking.philox import uniform
    from lily.reference import sample_distribution

    shares = sample_distribution(np.linspace(0.0, 3.0, 8), temperature=1.0)
    edges = np.cumsum(shares)
    counts = np.bincount([int(np.searchsorted(edges, uniform((7, 11), n), "right")) for n in range(400)], minlength=8)
    statistic = float(((counts - 400 * shares) ** 2 / (400 * shares)).sum())
    assert statistic < 24.3  # of 7 degrees of freedom
