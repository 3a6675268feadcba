"""CPU encodings of the experts' projections in prefill: grouped GEMMs over rows sorted by expert (model_spec §7)."""

from __future__ import annotations

import struct

from lily.ops import Op, Tensor, Weight
from lily.plan import Plan, read, update, write
from lily_builtin.cpu_combine import activate, routed, scratch, weighted_sum
from lily_builtin.cpu_linear import Projection, encode_gemm_of
from lily_builtin.cpu_matrix import FLOAT, MAX_BLOCK, WIDEST, block_rows, codes, gemm_bytes, pack_matrix, padded
from lily_builtin.encoding import empty_like, matrix

__all__ = ["encode_in_grouped", "encode_in_grouped_split", "encode_out_grouped", "encode_out_grouped_split"]

GATED = ("gate", "up")
SHARED = ("shared_gate", "shared_up")
PAIR_ROWS = 48
"""``kPairRows``: rows of the gate, and of the up projection, that a grouped GEMM multiplies at a time."""
PACKED_TOKENS = 128
"""Tokens a task packs for itself at a time."""


def encode_in_grouped(op: Op, plan: Plan, tile_rows: int) -> None:
    """One dispatch: gate, up and activation of every expert over its rows, and of the shared expert over all."""
    shape, rows = op.shape, op.shape["rows"]
    weights = [op.weight(role) for role in (*GATED, *SHARED)]
    width, shared_width = weights[0].rows, weights[2].rows
    task_rows, token_block = _task_rows(width), _token_block(rows, tile_rows)
    # A gate and an up projection of different formats take their input in different orders.
    layouts = max(len({codes(gate), codes(up)}) for gate, up in (weights[:2], weights[2:]))
    tasks = shape["experts"] * -(-width // task_rows) + -(-rows // token_block) * -(-shared_width // task_rows)
    plan.dispatch(
        "experts_in_grouped",
        [
            *(read(op.tensor(role).view) for role in ("h", "offsets", "order")),
            *(access for weight in weights[:2] for access in routed(op, weight, rows)),
            *(access for weight in weights[2:] for access in matrix(weight)),
            *(write(op.tensor(role).view) for role in ("act", "shared_act")),
        ],
        constants=struct.pack("<6I", rows, shape["top_k"], tile_rows, task_rows, token_block, 0)
        + b"".join(map(pack_matrix, weights)),
        tasks=tasks,
        worker_bytes=gemm_bytes(layouts * token_block, shape["hidden"]),
    )


def encode_in_grouped_split(op: Op, plan: Plan, tile_rows: int) -> None:
    """Grouped GEMMs for gate and up, GEMMs for the shared expert, and the activations."""
    h, act, shared_act = (op.tensor(role) for role in ("h", "act", "shared_act"))
    parts = [scratch(plan, *act.shape) for _ in GATED]
    for role, part in zip(GATED, parts, strict=True):
        _grouped(op, plan, h, op.weight(role), part, tile_rows, gather=True)
    shared = [scratch(plan, *shared_act.shape) for _ in SHARED]
    projection = Projection(h, None, [(op.weight(role), y) for role, y in zip(SHARED, shared, strict=True)])
    encode_gemm_of(projection, plan, tile_rows)
    activate(plan, parts[0].view, parts[1].view, act.view)
    activate(plan, shared[0].view, shared[1].view, shared_act.view)


def encode_out_grouped(op: Op, plan: Plan, tile_rows: int) -> None:
    """A dispatch that packs the activations, then one whose tasks each add all experts to some columns of x."""
    down, shared_down = op.weight("down"), op.weight("shared_down")
    rows, top_k, experts = op.shape["rows"], op.shape["top_k"], op.shape["experts"]
    slots = rows * top_k
    # Each expert that has rows fills up its last vector.
    panel_floats = (slots + (WIDEST - 1) * min(experts, slots)) * padded(down.cols, MAX_BLOCK)
    panels = plan.scratch(FLOAT * (panel_floats + padded(rows, WIDEST) * padded(shared_down.cols, MAX_BLOCK)))
    order = plan.scratch(4 * slots)
    block = block_rows(down.rows)
    constants = (
        struct.pack("<4IQ", rows, top_k, tile_rows, block, panel_floats) + pack_matrix(down) + pack_matrix(shared_down)
    )
    offsets = op.tensor("offsets").view
    plan.dispatch(
        "experts_out_pack",
        [
            *(read(op.tensor(role).view) for role in ("act", "shared_act")),
            read(offsets),
            read(op.tensor("inverse").view),
            write(panels),
            write(order),
        ],
        constants=constants,
        tasks=experts + -(-rows // tile_rows) + 1,
    )
    plan.dispatch(
        "experts_out_grouped",
        [
            *(read(view) for view in (panels, order, offsets, op.tensor("weights").view)),
            *routed(op, down, rows),
            *matrix(shared_down),
            update(op.tensor("x").view),
        ],
        constants=constants,
        tasks=-(-down.rows // block),
        worker_bytes=gemm_bytes(),
    )


def encode_out_grouped_split(op: Op, plan: Plan, tile_rows: int) -> None:
    """A grouped GEMM, a GEMM for the shared expert, then the weighted sum into the residual."""
    x = op.tensor("x")
    y = scratch(plan, op.shape["rows"] * op.shape["top_k"], op.shape["hidden"])
    _grouped(op, plan, op.tensor("act"), op.weight("down"), y, tile_rows, gather=False)
    shared = scratch(plan, *x.shape)
    projection = Projection(op.tensor("shared_act"), None, [(op.weight("shared_down"), shared)])
    encode_gemm_of(projection, plan, tile_rows)
    weighted_sum(op, plan, y, shared, op.tensor("inverse"))


def _grouped(op: Op, plan: Plan, x: Tensor, weight: Weight, y: Tensor, tile_rows: int, *, gather: bool) -> None:
    """``y`` sorted by expert ``= x @ weight[expert]ᵀ``; x has a row a token (``gather``) or is sorted itself."""
    rows, experts = op.shape["rows"], op.shape["experts"]
    task_rows, token_block = _task_rows(weight.rows), _token_block(rows, tile_rows)
    plan.dispatch(
        "experts_grouped",
        [
            read(x.view),
            read(op.tensor("offsets").view),
            read(op.tensor("order").view if gather else empty_like(x.view)),
            *routed(op, weight, rows),
            write(y.view),
        ],
        constants=struct.pack("<6I", rows, op.shape["top_k"], tile_rows, task_rows, token_block, int(gather))
        + pack_matrix(weight),
        tasks=experts * -(-weight.rows // task_rows),
        worker_bytes=gemm_bytes(token_block, weight.cols),
    )


def _task_rows(width: int) -> int:
    """Outputs of a grouped task: half an expert if that's several blocks, as each task packs the rows for itself."""
    return padded(width if width < 4 * PAIR_ROWS else -(-width // 2), PAIR_ROWS)


def _token_block(rows: int, tile_rows: int) -> int:
    return min(PACKED_TOKENS, padded(rows, tile_rows))
