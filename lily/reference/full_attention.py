"""Oracles of gated full attention (model specification §5): prepare, attention, output gate."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lily.reference.bfloat16 import as_float64
from lily.reference.dense import rms_norm, sigmoid, softmax

__all__ = ["attention", "attention_prepare", "gate_output", "rope"]

Array = NDArray[np.float64]


def rope(x: ArrayLike, positions: ArrayLike, theta: float, rotary_dim: int) -> Array:
    """Rotate the first ``rotary_dim`` = R dimensions of x [T, N, D]; the rest pass through.

    Pairs are half-split: dimensions m and m + R / 2 of a token at position p turn by the angle
    p · theta^(-2m / R).
    """
    values = as_float64(x)
    half = rotary_dim // 2
    frequencies = theta ** (-2.0 * np.arange(half) / rotary_dim)
    angles = np.asarray(positions, dtype=np.float64)[:, None, None] * frequencies
    cosine, sine = np.cos(angles), np.sin(angles)
    first, second, rest = values[..., :half], values[..., half:rotary_dim], values[..., rotary_dim:]
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return np.concatenate([*turned, rest], axis=-1)


def attention_prepare(
    u: ArrayLike,
    k: ArrayLike,
    q_norm: ArrayLike,
    k_norm: ArrayLike,
    positions: ArrayLike,
    theta: float,
    rotary_dim: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Split the output gate off, normalise and rotate; values enter the cache as projected.

    Args:
        u: [T, Nq, 2D], the q projection viewed by head: D query rows, then D gate rows.
        k: [T, Nkv, D], the k projection.
        q_norm, k_norm: [D] multipliers (1 + w included), shared by all heads.
        positions: [T] absolute positions.
        theta: base of the rotary frequencies.
        rotary_dim: leading dimensions that are rotated.
        eps: of both norms.

    Returns:
        q [T, Nq, D] and gate [T, Nq, D] (before its sigmoid), then k [T, Nkv, D] as it is cached.
    """
    joint = as_float64(u)
    head_dim = joint.shape[-1] // 2
    q = rope(rms_norm(joint[..., :head_dim], q_norm, eps), positions, theta, rotary_dim)
    return q, joint[..., head_dim:], rope(rms_norm(k, k_norm, eps), positions, theta, rotary_dim)


def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, first_position: int) -> Array:
    """Causal grouped-query attention with scale D^-0.5.

    Args:
        q: [T, Nq, D]; row t stands at position ``first_position`` + t.
        k, v: [S, Nkv, D], positions 0 to S - 1, S >= first_position + T; later rows are not read.
        first_position: tokens already in the cache.

    Returns:
        [T, Nq, D]; query head n reads key head n // (Nq / Nkv).
    """
    queries, keys, values = as_float64(q), as_float64(k), as_float64(v)
    tokens, query_heads, head_dim = queries.shape
    seen = first_position + tokens
    if keys.shape[0] < seen:
        raise ValueError(f"the cache holds {keys.shape[0]} rows but the last query stands at position {seen - 1}")
    group = query_heads // keys.shape[1]
    visible = np.arange(seen)[None, :] <= first_position + np.arange(tokens)[:, None]
    out = np.empty_like(queries)
    for head in range(query_heads):
        scores = queries[:, head] @ keys[:seen, head // group].T * head_dim**-0.5
        out[:, head] = softmax(np.where(visible, scores, -np.inf)) @ values[:seen, head // group]
    return out


def gate_output(attended: ArrayLike, gate: ArrayLike) -> Array:
    """attended · sigmoid(gate), both [T, Nq, D] -> [T, Nq · D], what o_proj reads."""
    gated = as_float64(attended) * sigmoid(gate)
    return gated.reshape(gated.shape[0], -1)
