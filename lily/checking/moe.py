"""Mixture of experts: random operands, and the oracle's outputs (model_spec §7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lily.checking.expected import SILU_SLOPE, exactly
from lily.checking.outcome import Judge, Outcome, Pairs, fixed, near, project_by
from lily.checking.problem import EPS, Builder, Built, Operands, Problem
from lily.checking.weights import random_pair
from lily.reference import group, rms_norm, sigmoid, silu

__all__ = [
    "build_experts_in",
    "build_experts_out",
    "build_group",
    "build_route",
    "judge_experts_in",
    "judge_experts_out",
    "judge_group",
    "judge_route",
]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

GARBAGE = 0x0FFFFFFF


def build_route(b: Builder) -> Built:
    rows, hidden, experts, top_k = (b.dim(key) for key in ("rows", "hidden", "experts", "top_k"))
    gate = b.weight(0, experts, hidden)
    if b.case.scenario == "tied":
        for view in (gate.weight, gate.scales, gate.biases):
            b.memory.bytes_of(view)[:] = 0
    return {
        "x": b.activation(rows, hidden, scale=3.0),
        "norm": b.norm(hidden),
        "gate": gate,
        "shared_gate": b.weight(1, 1, hidden),
        "h": b.output(rows, hidden),
        "ids": b.output(rows, top_k, dtype="i32"),
        "weights": b.output(rows, top_k + 1, dtype="f32"),
    }, {"eps": EPS}


def judge_route(problem: Problem) -> Judge:
    top_k = problem.op.shape["top_k"]
    h = rms_norm(problem.values("x"), problem.values("norm"), problem.op.params["eps"])
    scores, score_units = project_by(problem, h, "gate")
    shared, shared_unit = project_by(problem, h, "shared_gate")
    best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    wanted_h = near(problem, "h", h, np.abs(h))
    largest_unit = score_units.max(axis=1, keepdims=True)

    def pairs(outcome: Outcome) -> Pairs:
        got = outcome.values("ids")
        right = _right_choice(scores, got, 2 * wanted_h.tolerance * largest_unit)
        ids = np.where(right[:, None], got, best)
        chosen = np.take_along_axis(scores, ids, axis=1)
        shares = np.exp(chosen - chosen.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        factor = sigmoid(shared)
        want = np.concatenate([shares, factor], axis=1)
        unit = np.concatenate([shares * (1 + 2 * largest_unit), factor * (1 + shared_unit)], axis=1)
        return [
            (outcome.values("h"), wanted_h),
            (got, exactly("ids", ids)),
            (outcome.values("weights"), near(problem, "weights", want, unit)),
        ]

    return pairs


def _right_choice(scores: Array, ids: Ints, slack: Array) -> NDArray[np.bool_]:
    """Rows whose ids are right but for scores that differ by less than ``slack``, which float32 can't tell apart.

    Scores that are exactly equal without any slack are not among them: there the lowest id comes first.
    """
    legal = ((ids >= 0) & (ids < scores.shape[1])).all(axis=1)
    safe = np.where(legal[:, None], ids, np.arange(ids.shape[1]))
    distinct = np.array([len(set(row)) == len(row) for row in safe.tolist()])
    chosen = np.take_along_axis(scores, safe, axis=1)
    ordered = (chosen[:, :-1] > chosen[:, 1:] - slack).all(axis=1)
    rest = scores.copy()
    np.put_along_axis(rest, safe, -np.inf, axis=1)
    complete = chosen[:, -1] > rest.max(axis=1) - slack[:, 0]
    right: NDArray[np.bool_] = legal & distinct & ordered & complete
    return right


def _random_ids(b: Builder) -> Ints:
    """[rows, top_k] distinct experts a row; "skewed" prefers some, "one-sided" gives all rows the same."""
    preference = b.rng.random((b.dim("rows"), b.dim("experts")))
    if b.case.scenario == "skewed":
        preference[:, ::5] += 0.8
    elif b.case.scenario == "one-sided":
        preference[:] = preference[0]
    return np.argsort(-preference, axis=1)[:, : b.dim("top_k")]


def _block_map(ids: Ints, experts: int, tile_rows: int) -> tuple[Ints, int]:
    """The blocks of moe.group in a list as long as an engine makes it for tiles of 16 rows; and how many are used."""
    found = group(ids, experts, tile_rows)
    capacity = min(ids.size, experts + ids.size // 16) + 1
    blocks = np.full((capacity, 3), GARBAGE, np.int64)
    count = len(found.block_expert)
    blocks[:count] = np.stack([found.block_expert, found.block_row, found.block_rows], axis=1)
    blocks[count] = 0
    return blocks, count


def build_group(b: Builder) -> Built:
    ids, experts = _random_ids(b), b.dim("experts")
    blocks, _ = _block_map(ids, experts, b.dim("tile_rows"))
    return {
        "ids": b.scratch(ids, "i32"),
        "offsets": b.output(experts + 1, dtype="i32"),
        "order": b.output(ids.size, dtype="i32"),
        "inverse": b.output(ids.size, dtype="i32"),
        "blocks": b.output(*blocks.shape, dtype="i32"),
    }, {"tile_rows": b.dim("tile_rows")}


def judge_group(problem: Problem) -> Judge:
    op, ids, experts = problem.op, problem.values("ids"), problem.op.shape["experts"]
    tile_rows = int(op.params["tile_rows"])
    found = group(ids, experts, tile_rows)
    blocks, count = _block_map(ids, experts, tile_rows)
    defined = np.zeros(blocks.shape, bool)
    defined[:count] = True
    defined[count, 2] = True  # rows 0 ends the list
    return fixed(
        exactly("offsets", found.offsets),
        exactly("order", found.slots),
        exactly("inverse", found.rows),
        exactly("blocks", blocks, defined),
    )


def _groups(b: Builder, ids: Ints, *roles: str) -> Operands:
    """In prefill, what moe.group would have written; blocks after the end of the list hold garbage."""
    if b.case.phase == "decode":
        return {}
    found = group(ids, b.dim("experts"), b.dim("tile_rows"))
    blocks, _ = _block_map(ids, b.dim("experts"), b.dim("tile_rows"))
    arrays = {"offsets": found.offsets, "order": found.slots, "inverse": found.rows, "blocks": blocks}
    return {role: b.scratch(arrays[role], "i32") for role in roles}


def build_experts_in(b: Builder) -> Built:
    rows, hidden, width, shared = (b.dim(key) for key in ("rows", "hidden", "expert_width", "shared_width"))
    ids = _random_ids(b)
    gate, up = random_pair(b.memory, b.rng, width, hidden, b.format(0), experts=b.dim("experts"))
    return {
        "h": b.activation(rows, hidden, scale=2.0),
        "ids": b.scratch(ids, "i32"),
        **_groups(b, ids, "offsets", "order", "blocks"),
        "gate": gate,
        "up": up,
        "shared_gate": b.weight(1, shared, hidden),
        "shared_up": b.weight(2, shared, hidden),
        "act": b.output(ids.size, width),
        "shared_act": b.output(rows, shared),
    }, {}


def judge_experts_in(problem: Problem) -> Judge:
    op, h, ids = problem.op, problem.values("h"), problem.values("ids")
    want = np.empty((*ids.shape, op.shape["expert_width"]))
    unit = np.empty_like(want)
    for expert in np.unique(ids):
        token, choice = np.nonzero(ids == expert)
        want[token, choice], unit[token, choice] = _gated(problem, h[token], "gate", "up", int(expert))
    want, unit = (array.reshape(-1, want.shape[-1]) for array in (want, unit))
    if op.phase == "prefill":
        order = group(ids, op.shape["experts"], 1).slots
        want, unit = want[order], unit[order]
    shared = _gated(problem, h, "shared_gate", "shared_up")
    return fixed(near(problem, "act", want, unit), near(problem, "shared_act", *shared))


def _gated(problem: Problem, h: Array, gate: str, up: str, expert: int = 0) -> tuple[Array, Array]:
    """silu(gate h) · (up h) and its unit."""
    g, g_unit = project_by(problem, h, gate, expert)
    u, u_unit = project_by(problem, h, up, expert)
    value = silu(g) * u
    return value, SILU_SLOPE * g_unit * np.abs(u) + np.abs(silu(g)) * u_unit + np.abs(value)


def build_experts_out(b: Builder) -> Built:
    rows, hidden, width, shared = (b.dim(key) for key in ("rows", "hidden", "expert_width", "shared_width"))
    ids, top_k = _random_ids(b), b.dim("top_k")
    weights = np.concatenate([b.rng.dirichlet(np.ones(top_k), rows), b.rng.random((rows, 1))], axis=1)
    return {
        "act": b.activation(ids.size, width),
        "shared_act": b.activation(rows, shared),
        "ids": b.scratch(ids, "i32"),
        **_groups(b, ids, "offsets", "inverse", "blocks"),
        "weights": b.scratch(weights, "f32"),
        "down": b.weight(0, hidden, width, b.dim("experts")),
        "shared_down": b.weight(1, hidden, shared),
        "x": b.residual(rows, hidden),
    }, {}


def judge_experts_out(problem: Problem) -> Judge:
    op = problem.op
    act, shared_act, ids, weights, x = (problem.values(k) for k in ("act", "shared_act", "ids", "weights", "x"))
    places = np.arange(ids.size) if op.phase == "decode" else group(ids, op.shape["experts"], 1).rows
    by_choice = act[places].reshape(*ids.shape, -1)
    shared, shared_unit = project_by(problem, shared_act, "shared_down")
    want, unit = x + weights[:, -1:] * shared, np.abs(x) + weights[:, -1:] * shared_unit
    for expert in np.unique(ids):
        token, choice = np.nonzero(ids == expert)
        value, value_unit = project_by(problem, by_choice[token, choice], "down", int(expert))
        share = weights[token, choice][:, None]
        want[token] += share * value
        unit[token] += share * value_unit
    return fixed(near(problem, "x", want, unit))
