"""Embedding, linear and logits: random operands, and the oracle's outputs (model_spec §3 and §4)."""

from __future__ import annotations

import numpy as np

from lily.checking.expected import Expected, exactly
from lily.checking.outcome import ONE_ROUNDING, Judge, fixed, near, project_by
from lily.checking.problem import EPS, Builder, Built, Operands, Problem
from lily.checking.weights import row_values
from lily.reference import rms_norm

__all__ = ["build_embed", "build_linear", "build_logits", "judge_embed", "judge_linear", "judge_logits"]


def build_embed(b: Builder) -> Built:
    rows, vocab, hidden = b.dim("rows"), b.dim("vocab"), b.dim("hidden")
    tokens = b.rng.integers(0, vocab, rows)
    tokens[-1], tokens[0] = 0, vocab - 1
    return {"tokens": b.control(tokens), "table": b.weight(0, vocab, hidden), "x": b.output(rows, hidden)}, {}


def judge_embed(problem: Problem) -> Judge:
    table = problem.op.weight("table")
    want, unit = row_values(problem.memory, table, problem.values("tokens"))
    if not table.group_size and problem.op.tensor("x").dtype == "f32":
        return fixed(exactly("x", want))
    return fixed(near(problem, "x", want, unit, tolerance=ONE_ROUNDING))


def build_linear(b: Builder) -> Built:
    rows, cols = b.dim("rows"), b.dim("in_features")
    residual = b.case.scenario == "residual"
    operands: Operands = {}
    if b.case.scenario == "norm":
        # Rows of very different size: a norm that is left out or shared between rows shows.
        sizes = 2.0 ** b.rng.integers(-4, 5, (rows, 1))
        operands["x"], operands["norm"] = b.scratch(b.normal(rows, cols) * sizes), b.norm(cols)
    else:
        operands["x"] = b.activation(rows, cols)
    for i, size in enumerate(size for key, size in b.case.dims.items() if key.startswith("out")):
        operands[f"w{i}"] = b.weight(i, size, cols)
        operands[f"y{i}"] = b.residual(rows, size) if residual and i == 0 else b.output(rows, size)
    return operands, {"eps": EPS, "residual": int(residual)}


def judge_linear(problem: Problem) -> Judge:
    op, x = problem.op, problem.values("x")
    if op.has("norm"):
        x = rms_norm(x, problem.values("norm"), op.params["eps"])
    expected: list[Expected] = []
    for i in range(op.shape["parts"]):
        want, unit = project_by(problem, x, f"w{i}")
        if op.params["residual"] and i == 0:
            before = problem.values("y0")
            want, unit = want + before, unit + np.abs(before)
        expected.append(near(problem, f"y{i}", want, unit))
    return fixed(*expected)


def build_logits(b: Builder) -> Built:
    rows, hidden, vocab = b.dim("rows"), b.dim("hidden"), b.dim("vocab")
    return {
        "x": b.activation(rows, hidden, scale=3.0),
        "norm": b.norm(hidden),
        "head": b.weight(0, vocab, hidden),
        "logits": b.output(rows, vocab, dtype="f32"),
    }, {"eps": EPS}


def judge_logits(problem: Problem) -> Judge:
    normed = rms_norm(problem.values("x"), problem.values("norm"), problem.op.params["eps"])
    return fixed(near(problem, "logits", *project_by(problem, normed, "head")))
