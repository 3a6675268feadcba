"""The sampler: random operands, and whether a token is a right draw."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily.checking.expected import exactly
from lily.checking.outcome import Judge, Outcome, Pairs
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
        if field.name in STEP_DTYPE.fields:
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

    def pairs(outcome: Outcome) -> Pairs:
        got = outcome.values("step").reshape(-1)
        token = int(_step(got)["token"])
        want = token if _right_draw(allowed, step, token) else _likeliest(allowed, step)
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


def _likeliest(allowed: Array, step: Any) -> int:
    return int(np.argmax(allowed))


def _right_draw(allowed: Array, step: Any, token: int) -> bool:
    """Whether a sampler with these parameters may draw ``token``."""
    if not 0 <= token < len(allowed) or allowed[token] == -np.inf:
        return False
    best = allowed.max()
    temperature, top_p, min_p = (float(step[name]) for name in ("temperature", "top_p", "min_p"))
    if temperature == 0.0:
        return token == int(np.argmax(allowed)) or 0 < best - allowed[token] < CLOSE * abs(best)
    wide = sample_distribution(allowed, temperature, int(step["top_k"]), min(top_p + CLOSE, 1.0), min_p * (1 - CLOSE))
    return bool(wide[token] > 0)
