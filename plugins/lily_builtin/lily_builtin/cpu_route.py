"""CPU variants of moe.route and moe.group, on the device or, as an ablation, with a pause (model_spec §7)."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from lily.hosts.base import HostMemory
from lily.ops import Op, Tensor
from lily.plan import Access, Plan, View, read, write
from lily.registry import KernelVariant
from lily_builtin.cpu_linear import Projection, encode_gemm_of, encode_gemv_of
from lily_builtin.cpu_matrix import FLOAT, gemv_bytes, input_floats, numbered, pack_matrix, padded, row_form
from lily_builtin.encoding import matrix

__all__ = ["VARIANTS"]

TASK_ROWS, TASK_TOKENS = 16, 8
"""``kTaskRows`` and ``kTaskTokens`` of kernels/cpu/route.cc."""
GRABS = 32
"""Grabs a dispatch is cut into at least, if it has that many tasks, so that 2 to 16 threads end together."""
GEMV_ROWS = 8
"""Up to so many rows, the split variants take their scores by GEMV."""
TILE_ROWS = 32
MAX_TOP_K = 64
"""``kMaxTopK`` of kernels/cpu/route_select.h."""
HEADER = 64
"""``Prepared::kHeader`` of kernels/cpu/route.cc."""


def encode_route_fused(op: Op, plan: Plan) -> None:
    """Two dispatches: scores of some experts for some rows a task, with the norm before them; then the choice."""
    shape = op.shape
    rows, hidden, experts = shape["rows"], shape["hidden"], shape["experts"]
    gate, shared = op.weight("gate"), op.weight("shared_gate")
    forms = numbered([row_form(gate), row_form(shared)])
    blocks = -(-experts // TASK_ROWS)
    tasks = -(-rows // TASK_TOKENS) * blocks
    scores, shared_scores = _score_tensors(op, plan)
    plan.dispatch(
        "route_scores",
        [
            *(read(op.tensor(role).view) for role in ("x", "norm")),
            *matrix(gate),
            *matrix(shared),
            *(write(view) for view in (op.tensor("h").view, scores.view, shared_scores.view)),
        ],
        constants=struct.pack("<2IfI", rows, hidden, op.params["eps"], 0)
        + pack_matrix(gate, forms[0])
        + pack_matrix(shared, forms[1]),
        tasks=tasks,
        # A thread prepares its rows anew for every grab that has others: all experts are one grab where rows are many.
        threads=max(1, min(blocks, tasks // GRABS)),
        worker_bytes=HEADER + gemv_bytes(hidden, (max(forms) + 1) * TASK_TOKENS * input_floats(hidden)),
    )
    _select(op, plan, scores.view, shared_scores.view)


def encode_route_split(op: Op, plan: Plan) -> None:
    """Norm, scores (a GEMV, or a packing and a GEMM), then the choice."""
    _select(op, plan, *_split_scores(op, plan))


def encode_route_host(op: Op, plan: Plan) -> None:
    """Norm and scores on the device, then a pause in which the CPU's Python side chooses."""
    scores, shared = _split_scores(op, plan)
    rows, experts, top_k = (op.shape[key] for key in ("rows", "experts", "top_k"))
    ids, weights = op.tensor("ids").view, op.tensor("weights").view

    def choose(memory: HostMemory) -> None:
        chosen, share = choose_experts(memory.array(scores, "f4").reshape(rows, experts), top_k)
        memory.array(ids, "i4")[:] = chosen.reshape(-1)
        gates = 1.0 / (1.0 + np.exp(-memory.array(shared, "f4")))
        memory.array(weights, "f4")[:] = np.column_stack([share, gates]).reshape(-1)

    plan.host_call(f"{op.label} choice of experts", choose, [read(scores), read(shared), *_choice(op)])


def choose_experts(scores: np.ndarray[Any, Any], top_k: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Expert ids ``[rows, top_k]``, best first and the lowest id first among equals, and weights that sum to 1.

    Args:
        scores: float32 ``[rows, experts]``, before the softmax.
    """
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(probabilities, ids, axis=1)
    return ids.astype(np.int32), chosen / chosen.sum(axis=1, keepdims=True)


def encode_group_device(op: Op, plan: Plan) -> None:
    """One dispatch of one task."""
    experts = op.shape["experts"]
    blocks = op.tensor("blocks")
    plan.dispatch(
        "moe_group",
        [read(op.tensor("ids").view), *_grouping(op)],
        constants=struct.pack("<4I", op.tensor("ids").size, experts, blocks.shape[0], int(op.params["tile_rows"])),
        tasks=1,
        worker_bytes=experts * 4,
    )


def encode_group_host(op: Op, plan: Plan) -> None:
    """A pause in which the CPU's Python side groups the rows."""
    experts, tile_rows = op.shape["experts"], int(op.params["tile_rows"])
    ids, targets = op.tensor("ids").view, [access.view for access in _grouping(op)]

    def group(memory: HostMemory) -> None:
        for target, values in zip(targets, group_rows(memory.array(ids, "i4"), experts, tile_rows), strict=True):
            out = memory.array(target, "i4")
            out[: values.size] = values
            out[values.size :] = 0

    plan.host_call(f"{op.label} grouping", group, [read(ids), *_grouping(op)])


def group_rows(ids: np.ndarray[Any, Any], experts: int, tile_rows: int) -> list[np.ndarray[Any, Any]]:
    """offsets, order, inverse and blocks (flat, without an end) of the op moe.group, from its flat ``ids``."""
    offsets = np.concatenate([[0], np.cumsum(np.bincount(ids, minlength=experts))])
    order = np.argsort(ids, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    blocks = [
        (expert, first, min(tile_rows, offsets[expert + 1] - first))
        for expert in range(experts)
        for first in range(offsets[expert], offsets[expert + 1], tile_rows)
    ]
    return [array.astype(np.int32) for array in (offsets, order, inverse, np.array(blocks).reshape(-1))]


def _score_tensors(op: Op, plan: Plan) -> tuple[Tensor, Tensor]:
    rows, experts = op.shape["rows"], op.shape["experts"]
    return (
        Tensor(plan.scratch(rows * experts * FLOAT), (rows, experts)),
        Tensor(plan.scratch(rows * FLOAT), (rows, 1)),
    )


def _split_scores(op: Op, plan: Plan) -> tuple[View, View]:
    rows, hidden = op.shape["rows"], op.shape["hidden"]
    h = op.tensor("h")
    plan.dispatch(
        "norm_rows",
        [read(op.tensor("x").view), read(op.tensor("norm").view), write(h.view)],
        constants=struct.pack("<2IfI", rows, hidden, op.params["eps"], 0),
        tasks=rows,
        threads=4,
    )
    scores, shared = _score_tensors(op, plan)
    projection = Projection(h, None, [(op.weight("gate"), scores), (op.weight("shared_gate"), shared)])
    if rows <= GEMV_ROWS:
        encode_gemv_of(projection, plan)
    else:
        encode_gemm_of(projection, plan, TILE_ROWS)
    return scores.view, shared.view


def _select(op: Op, plan: Plan, scores: View, shared: View) -> None:
    rows, experts, top_k = (op.shape[key] for key in ("rows", "experts", "top_k"))
    plan.dispatch(
        "route_select",
        [read(scores), read(shared), *_choice(op)],
        constants=struct.pack("<4I", rows, experts, top_k, 0),
        tasks=rows,
        threads=8,
        worker_bytes=padded(experts, 16) * FLOAT,
    )


def _choice(op: Op) -> list[Access]:
    return [write(op.tensor(role).view) for role in ("ids", "weights")]


def _grouping(op: Op) -> list[Access]:
    return [write(op.tensor(role).view) for role in ("offsets", "order", "inverse", "blocks")]


def _top_k_fits(op: Op) -> bool:
    return op.shape["top_k"] <= min(MAX_TOP_K, op.shape["experts"])


_REQUIREMENT = f"at most {MAX_TOP_K} experts a token"

VARIANTS: list[KernelVariant] = [
    KernelVariant(
        op="moe.route",
        name="fused",
        host="cpu",
        encode=encode_route_fused,
        summary="norm and scores in one dispatch, then the choice",
        accepts=_top_k_fits,
        requirement=_REQUIREMENT,
    ),
    KernelVariant(
        op="moe.route",
        name="split",
        host="cpu",
        encode=encode_route_split,
        summary="norm, scores and choice one after another",
        accepts=_top_k_fits,
        requirement=_REQUIREMENT,
    ),
    KernelVariant(
        op="moe.route",
        name="host_routed",
        host="cpu",
        encode=encode_route_host,
        summary="ablation: experts are chosen in a pause of the plan, in every layer",
    ),
    KernelVariant(
        op="moe.group",
        name="device",
        host="cpu",
        encode=encode_group_device,
        summary="histogram, prefix scan, stable scatter and block map in one dispatch",
    ),
    KernelVariant(
        op="moe.group",
        name="host_routed",
        host="cpu",
        encode=encode_group_host,
        summary="ablation: rows are grouped in a pause of the plan, in every layer",
    ),
]
