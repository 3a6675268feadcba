"""The sampler: random operands, and whether a token is a right draw."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily.checking.expected import exactly
from lily.checking.outcome import Judge, Outcome, Pairs
from lily.checking.philox import uniform
from lily.checking.problem import Builder, Built, Problem
from lily.checking.samplers import SCENARIOS
from lily.reference import penalise, sample_distribution
from lily.step import RING, STEP_DTYPE

__all__ = ["build_sample", "judge_sample"]

Array = NDArray[np.float64]

CLOSE = 1e-5
"""Relative: logits and probabilities nearer than this are the same in float32, after a penalty and an exponential."""


def build_sample(b: Builder) -> Built:
    sampler, vocab = SCENARIOS[b.case.scenario], b.dim("vocab")
    mask = (b.rng.random(vocab) > 0.05).astype(np.uint8)
    mask[b.rng.integers(vocab)] = 1
    logits = b.normal(vocab, scale=sampler.spread)
    logits[mask == 0] += 40.0  # an id without a token would win, were it not left out
    seen = np.where(b.rng.random(vocab) < 0.1, b.rng.integers(1, 6, vocab), 0)
    counts = np.stack([seen, np.minimum(seen, b.rng.integers(0, 3, vocab))])
    step: NDArray[Any] = np.zeros(1, STEP_DTYPE)
    step["position"], step["token"], step["count"] = 300, vocab - 1, 3 * RING - 1
    step["seed_low"], step["seed_high"] = b.rng.integers(0, 2**32, 2)
    step["ring"] = b.rng.integers(0, vocab, RING)
    for field in fields(sampler):
        if field.name != "spread":
            step[field.name] = getattr(sampler, field.name)
    return {
        "logits": b.scratch(logits, "f32"),
        "mask": b.control(mask, "u8"),
        "counts": b.memory.updated(b.control(counts)),
        "step": b.memory.updated(b.control(step.view(np.int32))),
    }, {"advance": b.dim("advance")}


def judge_sample(problem: Problem) -> Judge:
    logits, mask, counts = (problem.values(role) for role in ("logits", "mask", "counts"))
    step = _step(problem.values("step"))
    advance = int(problem.op.params["advance"])
    penalised = penalise(
        logits,
        counts[0],
        counts[1],
        repetition=float(step["repetition_penalty"]),
        presence=float(step["presence_penalty"]),
        frequency=float(step["frequency_penalty"]),
    )
    allowed = np.where(mask != 0, penalised, -np.inf)

    best = _draw(allowed, step)

    def pairs(outcome: Outcome) -> Pairs:
        got = outcome.values("step").reshape(-1)
        token = int(_step(got)["token"])
        want = token if _indistinguishable(allowed, step, token) else best
        noted = step.copy()
        noted["position"] += advance
        noted["token"] = want
        noted["count"] += 1
        noted["ring"][int(step["count"]) % RING] = want
        after = counts.copy()
        after[:, want] += 1
        return [
            (np.array([token]), exactly("step.token", np.array([want]))),
            (got, exactly("step", np.array([noted]).view(np.int32).astype(np.int64))),
            (outcome.values("counts"), exactly("counts", after)),
        ]

    return pairs


def _step(words: NDArray[np.int64]) -> Any:
    return words.reshape(-1).astype(np.int32).view(STEP_DTYPE)[0]


def _number(step: Any) -> float:
    return uniform((int(step["seed_low"]), int(step["seed_high"])), int(step["count"]))


def _shares(allowed: Array, step: Any, nudge: float = 0.0) -> Array:
    """The distribution a token is drawn from, with the filters' thresholds moved a little."""
    top_p, min_p = float(step["top_p"]), float(step["min_p"])
    nudged = min(top_p + nudge, 1.0) if top_p < 1.0 else top_p
    return sample_distribution(allowed, float(step["temperature"]), int(step["top_k"]), nudged, min_p * (1 - nudge))


def _draw(allowed: Array, step: Any) -> int:
    """The right token: the cumulative distribution, in order of id, inverted at the Philox number of seed and count."""
    shares = _shares(allowed, step)
    passed = np.flatnonzero((np.cumsum(shares) > _number(step)) & (shares > 0))
    return int(passed[0]) if len(passed) else int(np.flatnonzero(shares)[-1])


def _indistinguishable(allowed: Array, step: Any, token: int) -> bool:
    """Whether float32 can't tell ``token`` from the right one.

    Rounding may move the number across the edge between two tokens, and a token across the edge of a filter; and two
    logits may be too close to say which is larger. Equal ones are not: the lowest id wins.
    """
    if not 0 <= token < len(allowed) or allowed[token] == -np.inf:
        return False
    if float(step["temperature"]) == 0.0:
        largest = float(allowed.max())
        return bool(0 < largest - allowed[token] < CLOSE * abs(largest))
    number = _number(step)
    for nudge in (0.0, CLOSE, -CLOSE):
        shares = _shares(allowed, step, nudge)
        below = float(shares[:token].sum())
        if shares[token] > 0 and below - CLOSE <= number <= below + shares[token] + CLOSE:
            return True
    return False
