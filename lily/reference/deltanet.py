"""Oracles of Gated DeltaNet (model specification §6): prepare, scan in two forms, gated norm."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lily.reference.bfloat16 import as_float64
from lily.reference.dense import rms_norm, sigmoid, silu, softplus

__all__ = [
    "L2_NORM_EPS",
    "deltanet_blockwise",
    "deltanet_prepare",
    "deltanet_recurrence",
    "gated_norm",
]

Array = NDArray[np.float64]

L2_NORM_EPS = 1e-6
"""Added to the sum of squares of q and k; a constant of the architecture, not ``rms_norm_eps``."""


def deltanet_prepare(
    p: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    conv_state: ArrayLike,
    conv_weight: ArrayLike,
    a_log: ArrayLike,
    dt_bias: ArrayLike,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Causal depthwise convolution with SiLU, l2-norm of q and k, decay and beta.

    Args:
        p: [T, C] joint projection, columns q, k, v; C = 2 · key_heads · key_dim +
            value_heads · value_dim.
        a, b: [T, value_heads] projections for decay and beta.
        conv_state: [taps - 1, C] rows of ``p`` before the first token, oldest first; zeros at the
            start.
        conv_weight: [C, taps]; the last tap multiplies the current token.
        a_log, dt_bias: [value_heads].

    Returns:
        q [T, key_heads, key_dim] with its factor key_dim^-0.5, k likewise without one,
        v [T, value_heads, value_dim], decay and beta [T, value_heads] in (0, 1),
        and the new convolution state [taps - 1, C] (values before convolution and SiLU).
    """
    projected, weight = as_float64(p), as_float64(conv_weight)
    tokens, taps = projected.shape[0], weight.shape[1]
    padded = np.concatenate([as_float64(conv_state), projected])
    mixed = silu(sum((padded[j : j + tokens] * weight[:, j] for j in range(taps)), np.zeros_like(projected)))
    q, k, v = np.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    q, k = q.reshape(tokens, key_heads, key_dim), k.reshape(tokens, key_heads, key_dim)
    q = q / np.sqrt(np.sum(q * q, axis=-1, keepdims=True) + L2_NORM_EPS) * key_dim**-0.5
    k = k / np.sqrt(np.sum(k * k, axis=-1, keepdims=True) + L2_NORM_EPS)
    decay = np.exp(-np.exp(as_float64(a_log)) * softplus(as_float64(a) + as_float64(dt_bias)))
    return q, k, v.reshape(tokens, value_heads, value_dim), decay, sigmoid(b), padded[tokens:]


def deltanet_recurrence(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, decay: ArrayLike, beta: ArrayLike, state: ArrayLike
) -> tuple[Array, Array]:
    """The gated delta rule token by token: decay, read for the delta, update, read for the output.

    Args:
        q, k: [T, Hk, dk] as prepared. v: [T, Hv, dv]. decay, beta: [T, Hv].
        state: [Hv, dv, dk]; value head n uses key head n // (Hv / Hk).

    Returns:
        o [T, Hv, dv] and the state after the last token [Hv, dv, dk]; ``state`` is left as it was.
    """
    queries, keys = _per_value_head(q, k, v)
    values, gamma, rate = as_float64(v), as_float64(decay), as_float64(beta)
    current = np.array(state, dtype=np.float64)
    out = np.empty_like(values)
    for t in range(values.shape[0]):
        current *= gamma[t][:, None, None]
        recalled = np.einsum("nvk,nk->nv", current, keys[t])
        delta = rate[t][:, None] * (values[t] - recalled)
        current += delta[:, :, None] * keys[t][:, None, :]
        out[t] = np.einsum("nvk,nk->nv", current, queries[t])
    return out, current


def deltanet_blockwise(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    decay: ArrayLike,
    beta: ArrayLike,
    state: ArrayLike,
    block: int,
) -> tuple[Array, Array]:
    """:func:`deltanet_recurrence` by ``block`` tokens at a time (Yang et al. 2024, WY form).

    With S the state at the block's start, g_t the product of the decays up to token t and R[t, i]
    that of the decays after token i up to t, the deltas d solve the triangular system

        d_t + beta_t · (sum over i < t of R[t, i] (k_t·k_i) d_i) = beta_t (v_t - g_t S k_t);

    outputs and the next state are then matrix products. The last block may be shorter.
    """
    queries, keys = (array.transpose(1, 0, 2) for array in _per_value_head(q, k, v))
    values = as_float64(v).transpose(1, 0, 2)
    gamma, rate = as_float64(decay).T, as_float64(beta).T
    current = np.array(state, dtype=np.float64)
    out = np.empty_like(values)
    for start in range(0, values.shape[1], block):
        rows = slice(start, start + block)
        query, key, value = queries[:, rows], keys[:, rows], values[:, rows]
        between = _decay_between(gamma[:, rows])
        since_start = np.cumprod(gamma[:, rows], axis=1)[:, :, None]
        before = np.tril(between * (key @ key.transpose(0, 2, 1)), -1)
        system = np.eye(key.shape[1]) + rate[:, rows, None] * before
        recalled = since_start * (key @ current.transpose(0, 2, 1))
        delta = np.linalg.solve(system, rate[:, rows, None] * (value - recalled))
        within = between * (query @ key.transpose(0, 2, 1))
        out[:, rows] = since_start * (query @ current.transpose(0, 2, 1)) + within @ delta
        to_end = between[:, -1, :, None]
        current = since_start[:, -1:] * current + (to_end * delta).transpose(0, 2, 1) @ key
    return out.transpose(1, 0, 2), current


def gated_norm(o: ArrayLike, z: ArrayLike, weight: ArrayLike, eps: float) -> Array:
    """RMS norm of o [T, Hv, dv] over dv, then times silu(z); ``weight`` [dv] is a multiplier."""
    return rms_norm(o, weight, eps) * silu(z)


def _per_value_head(q: ArrayLike, k: ArrayLike, v: ArrayLike) -> tuple[Array, Array]:
    queries, keys = as_float64(q), as_float64(k)
    sharing = np.shape(v)[1] // queries.shape[1]
    return np.repeat(queries, sharing, axis=1), np.repeat(keys, sharing, axis=1)


def _decay_between(gamma: Array) -> Array:
    """[N, B] -> [N, B, B]: [t, i] is the product of gamma over (i, t] for i <= t, else 0."""
    heads, tokens = gamma.shape
    between = np.zeros((heads, tokens, tokens))
    for t in range(tokens):
        # Products, not differences of logarithms: a decay that underflowed to zero stays exact.
        between[:, t, :t] = between[:, t - 1, :t] * gamma[:, t, None]
        between[:, t, t] = 1.0
    return between
