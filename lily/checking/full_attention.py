"""Gated full attention over a paged cache: random operands, and the oracle's outputs (model_spec §5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lily.checking.expected import BF16_ROUNDING, Expected, exactly
from lily.checking.memory import POISON, STALE, array_of, fill
from lily.checking.outcome import SUM, Judge, Outcome, Pairs, fixed, near
from lily.checking.problem import EPS, Builder, Built, Operands, Problem
from lily.ops import Tensor
from lily.plan import SlotKind
from lily.reference import (
    attention,
    attention_prepare,
    bfloat16_bits,
    gate_output,
    rms_norm,
    round_bfloat16,
    sigmoid,
)
from lily.step import PAGE_TOKENS

__all__ = ["build_attention", "build_prepare", "judge_attention", "judge_prepare"]

Array = NDArray[np.float64]

THETA = 1e7
SPARE_PAGES = 3
ITEMSIZE = {"f32": 4, "bf16": 2}

POOL = 1024
"""Random tokens that a cache is filled from: drawing each of a long context would take seconds."""

PAGE_STRIDE = 61
"""Tokens of the pool from one page's start to the next one's; odd, so that 1,024 pages all differ."""

ANGLE = 4 * 2.0**-23
"""Of a rotary angle, relative: frequency and product in float32. At position 40,000 it is far more than SUM."""


def _cache(b: Builder, length: int, filled: int) -> dict[str, Tensor]:
    """A paged cache for ``length`` tokens, the first ``filled`` of them there, and the step parameters that say so.

    Pages come in random order. Later rows of a used page hold large finite numbers, as a former user may leave them;
    the other pages hold NaN, and table entries beyond the used ones point to one of those.
    """
    used = -(-length // PAGE_TOKENS)
    order = b.rng.permutation(used + SPARE_PAGES).astype(np.int64)
    b.pages = order[:used]
    heads, dim = b.dim("kv_heads"), b.dim("head_dim")
    shape = (len(order), heads, PAGE_TOKENS, dim)
    operands = {
        "step": b.step(position=b.dim("position")),
        "pages": b.control(np.concatenate([b.pages, np.full(SPARE_PAGES, order[used])])),
    }
    for role in ("k_cache", "v_cache"):
        drawn = b.normal(heads, min(filled, POOL) + PAGE_TOKENS, dim)
        pool = bfloat16_bits(drawn) if b.case.cache_dtype == "bf16" else drawn
        view = b.memory.place(SlotKind.KV, int(np.prod(shape)) * ITEMSIZE[b.case.cache_dtype])
        operands[role] = Tensor(view, shape, b.case.cache_dtype)
        fill(b.memory.bytes_of(view), POISON)
        stored = array_of(b.memory.image(view.slot.index), operands[role])
        for index, page in enumerate(b.pages):
            fill(stored[page].reshape(-1).view(np.uint8), STALE)
            count = min(max(filled - index * PAGE_TOKENS, 0), PAGE_TOKENS)
            start = index * PAGE_STRIDE % max(min(filled, POOL), 1)
            stored[page, :, :count] = pool[:, start : start + count]
    return operands


def build_prepare(b: Builder) -> Built:
    rows, position, heads, kv_heads, dim = (b.dim(k) for k in ("rows", "position", "heads", "kv_heads", "head_dim"))
    cache = _cache(b, position + rows, position)
    row_bytes = dim * ITEMSIZE[b.case.cache_dtype]
    for token in range(position, position + rows):
        page, within = int(b.pages[token // PAGE_TOKENS]), token % PAGE_TOKENS
        for head in range(kv_heads):
            offset = ((page * kv_heads + head) * PAGE_TOKENS + within) * row_bytes
            b.memory.writable += [cache[role].view.part(offset, row_bytes) for role in ("k_cache", "v_cache")]
    operands: Operands = {
        "u": b.activation(rows, heads, 2 * dim),
        "k": b.activation(rows, kv_heads, dim),
        "v": b.activation(rows, kv_heads, dim),
        "q_norm": b.norm(dim),
        "k_norm": b.norm(dim),
        "q": b.output(rows, heads, dim),
        "gate": b.output(rows, heads, dim),
        **cache,
    }
    return operands, {"eps": EPS, "theta": THETA, "rotary_dim": b.dim("rotary_dim")}


def judge_prepare(problem: Problem) -> Judge:
    op, shape = problem.op, problem.op.shape
    u, k, v, q_norm, k_norm = (problem.values(role) for role in ("u", "k", "v", "q_norm", "k_norm"))
    eps, theta, rotary = op.params["eps"], op.params["theta"], int(op.params["rotary_dim"])
    start, dim, rows = problem.case.dims["position"], shape["head_dim"], shape["rows"]
    positions = np.arange(start, start + rows)
    q, gate, keys = attention_prepare(u, k, q_norm, k_norm, positions, theta, rotary, eps)
    angles = positions[:, None, None] * theta ** (-2.0 * np.arange(rotary // 2) / rotary)
    wanted_q = near(problem, "q", q, _rotated_unit(rms_norm(u[..., :dim], q_norm, eps), angles))
    wanted_gate = exactly("gate", gate)
    narrow = op.tensor("k_cache").dtype == "bf16"
    k_unit = _rotated_unit(rms_norm(k, k_norm, eps), angles)
    wanted_k = Expected("k_cache", keys, k_unit, wanted_q.tolerance, BF16_ROUNDING if narrow else 0.0)
    wanted_v = exactly("v_cache", round_bfloat16(v) if narrow else v)

    def pairs(outcome: Outcome) -> Pairs:
        written = slice(start, start + rows)
        return [
            (outcome.values("q"), wanted_q),
            (outcome.values("gate"), wanted_gate),
            (outcome.cached("k_cache")[written], wanted_k),
            (outcome.cached("v_cache")[written], wanted_v),
        ]

    return pairs


def _rotated_unit(normed: Array, angles: Array) -> Array:
    """For rotated dimensions the length of their pair, which is what an error of the angle moves along."""
    half = angles.shape[-1]
    unit = np.abs(normed)
    length = np.hypot(normed[..., :half], normed[..., half : 2 * half]) * (1 + angles * (ANGLE / SUM))
    unit[..., :half] = length
    unit[..., half : 2 * half] = length
    return unit


def build_attention(b: Builder) -> Built:
    rows, heads, dim = b.dim("rows"), b.dim("heads"), b.dim("head_dim")
    seen = b.dim("position") + rows
    # "peaked": the largest score takes nearly all of the weight, at a place that differs from row to row.
    return {
        "q": b.activation(rows, heads, dim, scale=8.0 if b.case.scenario == "peaked" else 1.0),
        "gate": b.activation(rows, heads, dim),
        "y": b.output(rows, heads * dim),
        **_cache(b, seen, seen),
    }, {}


def judge_attention(problem: Problem) -> Judge:
    q, gate = problem.values("q"), problem.values("gate")
    start = problem.case.dims["position"]
    seen, dim = start + len(q), q.shape[-1]
    keys, values = (problem.cached(role)[:seen] for role in ("k_cache", "v_cache"))
    want = gate_output(attention(q, keys, values, start), gate)
    # An error of a score is one of its weight, relative; a score's own unit is at most |q|·|k| (Cauchy and Schwarz).
    score = np.linalg.norm(q, axis=-1) * np.linalg.norm(keys, axis=-1).max() * dim**-0.5
    largest = np.repeat(np.abs(values).max(axis=0), q.shape[1] // values.shape[1], axis=0)  # [heads, head_dim]
    return fixed(near(problem, "y", want, largest * sigmoid(gate) * (1 + score[..., None])))
