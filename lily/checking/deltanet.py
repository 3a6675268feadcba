"""Gated DeltaNet: random operands, and the oracle's outputs (model_spec §6)."""

from __future__ import annotations

from typing import Any

import numpy as np

from lily.checking.expected import SILU_SLOPE, exactly
from lily.checking.outcome import RECURRENCE, Judge, fixed, near
from lily.checking.problem import EPS, Builder, Built, Problem
from lily.reference import deltanet_prepare, deltanet_recurrence, gated_norm, silu

__all__ = ["build_prepare", "build_recurrence", "judge_prepare", "judge_recurrence"]


def _gates(b: Builder, rows: int, heads: int) -> tuple[Any, Any, Any, Any]:
    """a, b, A_log and dt_bias that give decays from nearly 1 to nearly 0, as trained models have."""
    a_log = np.log(np.linspace(0.05, 16.0, heads)) if heads > 1 else np.zeros(1)
    return b.normal(rows, heads, scale=2.0), b.normal(rows, heads, scale=1.5), a_log, b.normal(heads) - 2.0


def build_prepare(b: Builder) -> Built:
    rows, keys, values, dim = (b.dim(key) for key in ("rows", "key_heads", "value_heads", "head_dim"))
    channels = (2 * keys + values) * dim
    a, beta, a_log, dt_bias = _gates(b, rows, values)
    return {
        "qkv": b.activation(rows, channels),
        "a": b.scratch(a),
        "b": b.scratch(beta),
        "conv_state": b.state(np.zeros((3, channels)) if b.case.scenario == "start" else b.normal(3, channels)),
        "conv_weight": b.vector(b.normal(channels, 4, scale=0.5)),
        "A_log": b.vector(a_log),
        "dt_bias": b.vector(dt_bias),
        "q": b.output(rows, keys, dim),
        "k": b.output(rows, keys, dim),
        "v": b.output(rows, values, dim),
        "decay": b.output(rows, values, dtype="f32"),
        "beta": b.output(rows, values, dtype="f32"),
    }, {}


def judge_prepare(problem: Problem) -> Judge:
    shape = problem.op.shape
    p, history, weight = (problem.values(role) for role in ("qkv", "conv_state", "conv_weight"))
    a, b, a_log, dt_bias = (problem.values(role) for role in ("a", "b", "A_log", "dt_bias"))
    keys, values, dim = shape["key_heads"], shape["value_heads"], shape["head_dim"]
    q, k, v, decay, beta, state = deltanet_prepare(p, a, b, history, weight, a_log, dt_bias, keys, values, dim, dim)
    padded, rows = np.concatenate([history, p]), len(p)
    terms = [padded[j : j + rows] * weight[:, j] for j in range(weight.shape[1])]
    mixed = silu(np.sum(terms, axis=0))
    unit = SILU_SLOPE * np.sum(np.abs(terms), axis=0) + np.abs(mixed)
    units = {}
    for role, part in (("q", slice(0, keys * dim)), ("k", slice(keys * dim, 2 * keys * dim))):
        value, error = (array[:, part].reshape(rows, keys, dim) for array in (mixed, unit))
        length = np.sqrt(np.sum(value**2, axis=-1, keepdims=True) + 1e-6)
        stretch = np.linalg.norm(error, axis=-1, keepdims=True) / length
        units[role] = (error + np.abs(value) * stretch) / length * (dim**-0.5 if role == "q" else 1.0)
    # decay is e^-x: an error of x is one of the decay, relative.
    rate, x = np.exp(a_log), -np.log(np.maximum(decay, 1e-300))
    x_unit = x * (1 + np.abs(a_log)) + rate * (np.abs(a) + np.abs(dt_bias))
    return fixed(
        near(problem, "q", q, units["q"]),
        near(problem, "k", k, units["k"]),
        near(problem, "v", v, unit[:, 2 * keys * dim :]),
        near(problem, "decay", decay, decay * (1 + x_unit)),
        near(problem, "beta", beta, beta * (1 + np.abs(b))),
        exactly("conv_state", state),
    )


def build_recurrence(b: Builder) -> Built:
    rows, keys, values, dim = (b.dim(key) for key in ("rows", "key_heads", "value_heads", "head_dim"))
    a, beta, a_log, dt_bias = _gates(b, rows, values)
    if b.case.scenario == "forgetful":
        a[rows // 2] = 200.0  # a decay that underflows to zero in the middle of the chunk
    channels = (2 * keys + values) * dim
    identity = np.tile([0.0, 0.0, 0.0, 1.0], (channels, 1))
    q, k, v, decay, rate, _ = deltanet_prepare(
        b.normal(rows, channels), a, beta, np.zeros((3, channels)), identity, a_log, dt_bias, keys, values, dim, dim
    )
    fresh = b.case.scenario == "start"
    state = np.zeros((values, dim, dim)) if fresh else b.normal(values, dim, dim, scale=dim**-0.5)
    return {
        "q": b.scratch(q),
        "k": b.scratch(k),
        "v": b.scratch(v),
        "decay": b.scratch(decay, "f32"),
        "beta": b.scratch(rate, "f32"),
        "z": b.activation(rows, values, dim),
        "norm": b.norm(dim),
        "state": b.state(state, "f32"),
        "y": b.output(rows, values * dim),
    }, {"eps": EPS}


def judge_recurrence(problem: Problem) -> Judge:
    q, k, v, decay, beta, start = (problem.values(role) for role in ("q", "k", "v", "decay", "beta", "state"))
    o, state = deltanet_recurrence(q, k, v, decay, beta, start)
    z, norm, eps = problem.values("z"), problem.values("norm"), problem.op.params["eps"]
    y = gated_norm(o, z, norm, eps)
    # One number a head: how large the state is, and what a token adds to it at most.
    largest = np.maximum(np.abs(start).max(axis=(1, 2)), np.abs(state).max(axis=(1, 2)))
    size = largest + np.abs(beta[..., None] * v).max(axis=(0, 2)) * np.abs(k).max()
    o_unit = np.repeat(np.abs(q).sum(axis=-1), v.shape[1] // q.shape[1], axis=1) * size  # [rows, value_heads]
    relative = (o_unit / np.sqrt(np.mean(o**2, axis=-1) + eps))[..., None]
    y_unit = relative * np.abs(norm * silu(z)) + np.abs(y) * (1 + relative)
    return fixed(
        near(problem, "state", state, np.broadcast_to(size[:, None, None], state.shape), tolerance=RECURRENCE),
        near(problem, "y", y, y_unit, tolerance=RECURRENCE),
    )
