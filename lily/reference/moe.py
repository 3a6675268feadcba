"""Oracles of the mixture of experts (model specification §7): route, group, experts in and out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lily.reference.bfloat16 import as_float64
from lily.reference.dense import linear, sigmoid, silu, softmax

__all__ = [
    "Grouping",
    "experts_in",
    "experts_out",
    "group",
    "route",
    "shared_expert_in",
    "shared_expert_scale",
]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Grouping:
    """Token slots sorted by expert, and the tiles of rows a grouped GEMM works on.

    A slot is one (token, choice) pair, numbered token · top_k + choice. A row is a place in the
    sorted order.

    Attributes:
        counts: [E] rows of each expert (the histogram).
        offsets: [E + 1] first row of each expert (exclusive prefix sum); the last entry is the
            number of rows.
        slots: [rows] the slot at each row; by expert, and in slot order within an expert.
        rows: [slots] the row of each slot, the inverse permutation.
        block_expert: [blocks] the expert of each tile.
        block_row: [blocks] the first row of each tile; a tile ends at the expert's end or after
            ``tile_rows`` rows.
        block_rows: [blocks] rows in each tile, 1 to ``tile_rows``.
    """

    counts: Ints
    offsets: Ints
    slots: Ints
    rows: Ints
    block_expert: Ints
    block_row: Ints
    block_rows: Ints


def route(h: ArrayLike, gate: ArrayLike, top_k: int) -> tuple[Ints, Array]:
    """Choose experts: softmax over all of them, the ``top_k`` largest, renormalised.

    Args:
        h: [T, H]. gate: [E, H].

    Returns:
        ids [T, top_k], most probable first and the lower id first among equals, and weights
        [T, top_k] of sum 1.
    """
    probabilities = softmax(linear(h, gate))
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(probabilities, ids, axis=-1)
    return ids.astype(np.int64), chosen / chosen.sum(axis=-1, keepdims=True)


def group(ids: ArrayLike, experts: int, tile_rows: int) -> Grouping:
    """Sort the slots of ``ids`` [T, top_k] by expert, stably, and cut their rows into tiles."""
    chosen = np.asarray(ids, dtype=np.int64).reshape(-1)
    counts = np.bincount(chosen, minlength=experts).astype(np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    slots = np.argsort(chosen, kind="stable")
    rows = np.empty_like(slots)
    rows[slots] = np.arange(slots.size)
    blocks = [
        (expert, first, min(tile_rows, int(offsets[expert + 1]) - first))
        for expert in range(experts)
        for first in range(int(offsets[expert]), int(offsets[expert + 1]), tile_rows)
    ]
    block_map = np.array(blocks, dtype=np.int64).reshape(-1, 3)
    return Grouping(counts, offsets, slots, rows, block_map[:, 0], block_map[:, 1], block_map[:, 2])


def experts_in(h: ArrayLike, ids: ArrayLike, gate: ArrayLike, up: ArrayLike) -> Array:
    """silu(gate_e h) · up_e h for every chosen expert.

    Args:
        h: [T, H]. ids: [T, top_k]. gate, up: [E, I, H].

    Returns:
        [T, top_k, I] in slot order.
    """
    hidden, chosen = as_float64(h), np.asarray(ids, dtype=np.int64)
    gates, ups = np.asarray(gate), np.asarray(up)
    out = np.empty((*chosen.shape, gates.shape[1]))
    for expert in np.unique(chosen):
        token, choice = np.nonzero(chosen == expert)
        out[token, choice] = shared_expert_in(hidden[token], gates[expert], ups[expert])
    return out


def experts_out(
    activation: ArrayLike,
    ids: ArrayLike,
    weights: ArrayLike,
    down: ArrayLike,
    shared_activation: ArrayLike,
    shared_scale: ArrayLike,
    shared_down: ArrayLike,
    residual: ArrayLike,
) -> Array:
    """Down projections weighted and summed, plus the shared expert, plus the residual.

    Args:
        activation: [T, top_k, I] of :func:`experts_in`.
        ids, weights: [T, top_k] of :func:`route`.
        down: [E, H, I].
        shared_activation: [T, S] of :func:`shared_expert_in`.
        shared_scale: [T] of :func:`shared_expert_scale`.
        shared_down: [H, S].
        residual: [T, H], or 0 for none.

    Returns:
        [T, H].
    """
    active, share = as_float64(activation), as_float64(weights)
    chosen, downs = np.asarray(ids, dtype=np.int64), np.asarray(down)
    shared = as_float64(shared_scale)[:, None] * linear(shared_activation, shared_down)
    total = as_float64(residual) + shared
    for expert in np.unique(chosen):
        token, choice = np.nonzero(chosen == expert)
        # A token chooses an expert at most once, so plain indexed addition never meets a row twice.
        total[token] += share[token, choice, None] * linear(active[token, choice], downs[expert])
    return total


def shared_expert_in(h: ArrayLike, gate: ArrayLike, up: ArrayLike) -> Array:
    """silu(h gateᵀ) · (h upᵀ): h [T, H], gate and up [S, H] -> [T, S]."""
    return silu(linear(h, gate)) * linear(h, up)


def shared_expert_scale(h: ArrayLike, gate: ArrayLike) -> Array:
    """sigmoid(h · gate), the shared expert's factor of each token: h [T, H], gate [1, H] -> [T]."""
    return sigmoid(linear(h, gate))[:, 0]
