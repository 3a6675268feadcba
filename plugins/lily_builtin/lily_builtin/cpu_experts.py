"""CPU variants of the experts' projections, moe.experts_in and moe.experts_out (model_spec §7)."""

from __future__ import annotations

import struct
from collections.abc import Callable

from lily.ops import Op, Tensor, Weight
from lily.plan import Plan, read, update, write
from lily.registry import KernelVariant
from lily_builtin.cpu_combine import activate, routed, scratch, weighted_sum
from lily_builtin.cpu_grouped import (
    encode_in_grouped,
    encode_in_grouped_split,
    encode_out_grouped,
    encode_out_grouped_split,
)
from lily_builtin.cpu_linear import TILE_ROWS, Projection, encode_gemv_of
from lily_builtin.cpu_matrix import (
    GEMV_TASK_ROWS,
    MAX_TOKENS,
    gemv_bytes,
    grain,
    input_floats,
    numbered,
    pack_matrix,
    row_bytes,
    row_form,
    rows_of,
)
from lily_builtin.encoding import matrix

__all__ = ["VARIANTS"]

OUT_RUN_TASKS = 4
"""Tasks of experts_out that are best taken together: ``kRunRows`` outputs."""

GATED = ("gate", "up")
SHARED = ("shared_gate", "shared_up")


def _in_decode(op: Op) -> bool:
    return op.phase == "decode"


def _in_prefill(op: Op) -> bool:
    return op.phase == "prefill"


def encode_in_gemv_fused(op: Op, plan: Plan) -> None:
    """One dispatch for each eight rows: every choice's gate, up and activation, and the shared expert's."""
    h, ids, act, shared_act = (op.tensor(role) for role in ("h", "ids", "act", "shared_act"))
    weights = [op.weight(role) for role in (*GATED, *SHARED)]
    forms = numbered([row_form(weight) for weight in weights])
    hidden, top_k = op.shape["hidden"], op.shape["top_k"]
    blocks, shared_blocks = (-(-weight.rows // GEMV_TASK_ROWS) for weight in (weights[0], weights[2]))
    for first in range(0, op.shape["rows"], MAX_TOKENS):
        tokens = min(MAX_TOKENS, op.shape["rows"] - first)
        tasks = tokens * (top_k * blocks + shared_blocks)
        plan.dispatch(
            "experts_in_gemv",
            [
                read(rows_of(h, first, tokens)),
                read(rows_of(ids, first, tokens)),
                *(access for weight in weights[:2] for access in routed(op, weight, tokens)),
                *(access for weight in weights[2:] for access in matrix(weight)),
                write(rows_of(act, first * top_k, tokens * top_k)),
                write(rows_of(shared_act, first, tokens)),
            ],
            constants=struct.pack("<4I", tokens, top_k, max(forms) + 1, 0) + b"".join(map(pack_matrix, weights, forms)),
            tasks=tasks,
            threads=grain(tasks, 2 * GEMV_TASK_ROWS * max(map(row_bytes, weights))),
            worker_bytes=gemv_bytes(hidden, (max(forms) + 1) * tokens * input_floats(hidden)),
        )


def encode_in_gemv_split(op: Op, plan: Plan) -> None:
    """Gate and up projections of the choices, those of the shared expert, and the activations."""
    h, ids, act, shared_act = (op.tensor(role) for role in ("h", "ids", "act", "shared_act"))
    parts = [scratch(plan, *act.shape) for _ in GATED]
    for role, part in zip(GATED, parts, strict=True):
        _gemv_of_choices(op, plan, h, ids, op.weight(role), part, choices=op.shape["top_k"])
    shared = [scratch(plan, *shared_act.shape) for _ in SHARED]
    encode_gemv_of(Projection(h, None, [(op.weight(role), y) for role, y in zip(SHARED, shared, strict=True)]), plan)
    activate(plan, parts[0].view, parts[1].view, act.view)
    activate(plan, shared[0].view, shared[1].view, shared_act.view)


def _gemv_of_choices(op: Op, plan: Plan, x: Tensor, ids: Tensor, weight: Weight, y: Tensor, choices: int) -> None:
    """``y[slot] = weight[ids[slot]] @ x[slot // choices]`` for each eight rows."""
    top_k = op.shape["top_k"]
    blocks = -(-weight.rows // GEMV_TASK_ROWS)
    for first in range(0, op.shape["rows"], MAX_TOKENS):
        tokens = min(MAX_TOKENS, op.shape["rows"] - first)
        slots = tokens * top_k
        inputs = slots // choices
        tasks = slots * blocks
        plan.dispatch(
            "experts_gemv",
            [
                read(rows_of(x, first * top_k // choices, inputs)),
                read(rows_of(ids, first, tokens)),
                *routed(op, weight, tokens),
                write(rows_of(y, first * top_k, slots)),
            ],
            constants=struct.pack("<2I", slots, choices) + pack_matrix(weight),
            tasks=tasks,
            threads=grain(tasks, GEMV_TASK_ROWS * row_bytes(weight)),
            worker_bytes=gemv_bytes(weight.cols, inputs * input_floats(weight.cols)),
        )


def encode_out_gemv_fused(op: Op, plan: Plan) -> None:
    """One dispatch for each eight rows: down projections, weights, shared expert, residual."""
    down, shared_down = op.weight("down"), op.weight("shared_down")
    act, shared_act, ids, weights, x = (op.tensor(k) for k in ("act", "shared_act", "ids", "weights", "x"))
    top_k = op.shape["top_k"]
    for first in range(0, op.shape["rows"], MAX_TOKENS):
        tokens = min(MAX_TOKENS, op.shape["rows"] - first)
        tasks = tokens * -(-down.rows // GEMV_TASK_ROWS)
        task_bytes = GEMV_TASK_ROWS * (top_k * row_bytes(down) + row_bytes(shared_down))
        prepared = tokens * (top_k * input_floats(down.cols) + input_floats(shared_down.cols))
        plan.dispatch(
            "experts_out_gemv",
            [
                read(rows_of(act, first * top_k, tokens * top_k)),
                *(read(rows_of(tensor, first, tokens)) for tensor in (shared_act, ids, weights)),
                *routed(op, down, tokens),
                *matrix(shared_down),
                update(rows_of(x, first, tokens)),
            ],
            constants=struct.pack("<2I", tokens, top_k) + pack_matrix(down) + pack_matrix(shared_down),
            tasks=tasks,
            threads=min(OUT_RUN_TASKS, grain(tasks, task_bytes)),
            worker_bytes=gemv_bytes(max(down.cols, shared_down.cols), prepared),
        )


def encode_out_gemv_split(op: Op, plan: Plan) -> None:
    """Down projections of the choices and of the shared expert, then the weighted sum into the residual."""
    x = op.tensor("x")
    y = scratch(plan, op.shape["rows"] * op.shape["top_k"], op.shape["hidden"])
    _gemv_of_choices(op, plan, op.tensor("act"), op.tensor("ids"), op.weight("down"), y, choices=1)
    shared = scratch(plan, *x.shape)
    encode_gemv_of(Projection(op.tensor("shared_act"), None, [(op.weight("shared_down"), shared)]), plan)
    weighted_sum(op, plan, y, shared, None)


def _decode(op: str, name: str, encode: Callable[..., None], summary: str) -> KernelVariant:
    return KernelVariant(op, name, "cpu", encode, summary, accepts=_in_decode, requirement="phase decode")


def _prefill(op: str, name: str, encode: Callable[..., None], summary: str) -> KernelVariant:
    options = {"tile_rows": TILE_ROWS}
    return KernelVariant(op, name, "cpu", encode, summary, _in_prefill, "phase prefill", options)


VARIANTS: list[KernelVariant] = [
    _decode(
        "moe.experts_in",
        "gemv_fused",
        encode_in_gemv_fused,
        "gate, up and activation of the chosen and shared experts in one dispatch",
    ),
    _decode(
        "moe.experts_in",
        "gemv_split",
        encode_in_gemv_split,
        "a dispatch for each projection, then the activations",
    ),
    _prefill(
        "moe.experts_in",
        "grouped",
        encode_in_grouped,
        "grouped GEMM that dequantises inside, gate, up and activation of all experts in one dispatch",
    ),
    _prefill(
        "moe.experts_in",
        "grouped_split",
        encode_in_grouped_split,
        "a grouped GEMM for each projection, then the activations",
    ),
    _decode(
        "moe.experts_out",
        "gemv_fused",
        encode_out_gemv_fused,
        "down projections, routing weights, shared expert and residual in one dispatch",
    ),
    _decode(
        "moe.experts_out",
        "gemv_split",
        encode_out_gemv_split,
        "down projections, then the weighted sum and residual",
    ),
    _prefill(
        "moe.experts_out",
        "grouped",
        encode_out_grouped,
        "grouped GEMM whose tasks own columns of the residual and add all experts to them",
    ),
    _prefill(
        "moe.experts_out",
        "grouped_split",
        encode_out_grouped_split,
        "grouped GEMM into scratch, then the weighted sum and residual",
    ),
]
