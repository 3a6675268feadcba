"""CPU variants of the experts' projections, moe.experts_in and moe.experts_out (model_spec §7)."""

from __future__ import annotations

import struct
from collections.abc import Callable

from lily.ops import Op, Tensor, Weight
from lily.plan import Access, Plan, View, read, update, write
from lily.registry import KernelVariant
from lily_builtin.cpu_linear import TILE_ROWS, Projection, encode_gemm_of, encode_gemv_of
from lily_builtin.cpu_matrix import (
    FLOAT,
    block_rows,
    gemm_bytes,
    gemv_bytes,
    grain,
    input_floats,
    numbered,
    pack_matrix,
    padded,
    row_bytes,
    row_form,
    rows_of,
)
from lily_builtin.encoding import empty_like, matrix

__all__ = ["VARIANTS"]

MAX_TOKENS = 8
"""Token rows of a decode dispatch, which each thread prepares for itself."""
GEMV_TASK_ROWS = 16
"""``kTaskRows`` of kernels/cpu/experts_gemv.cc."""
OUT_RUN_TASKS = 4
"""Tasks of experts_out that are best taken together: ``kRunRows`` outputs."""
ACTIVATION_TASK, SUM_TASK = 1024, 256
"""Elements of a task of silu_multiply and columns of one of experts_sum."""
PAIR_ROWS = 48
"""Rows of the gate, and of the up projection, that a grouped GEMM multiplies at a time."""
PACKED_TOKENS = 128
"""Tokens a task packs for itself at a time."""
WIDEST = 16
"""Floats of the widest vector: panels hold whole vectors of rows."""

GATED = ("gate", "up")
SHARED = ("shared_gate", "shared_up")


def _in_decode(op: Op) -> bool:
    return op.phase == "decode"


def _in_prefill(op: Op) -> bool:
    return op.phase == "prefill"


def _routed(op: Op, weight: Weight, tokens: int) -> list[Access]:
    """A stack of experts of which a step reads those that its rows chose."""
    chosen = min(op.shape["experts"], tokens * op.shape["top_k"])
    return matrix(weight, weight.moved(chosen))


def _scratch(plan: Plan, rows: int, cols: int) -> Tensor:
    return Tensor(plan.scratch(rows * cols * FLOAT), (rows, cols))


def _activate(plan: Plan, gate: View, up: View, out: View) -> None:
    count = out.nbytes // FLOAT
    tasks = -(-count // ACTIVATION_TASK)
    plan.dispatch(
        "silu_multiply",
        [read(gate), read(up), write(out)],
        constants=struct.pack("<2I", count, 0),
        tasks=tasks,
        threads=grain(tasks, ACTIVATION_TASK * 3 * FLOAT),
    )


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
                *(access for weight in weights[:2] for access in _routed(op, weight, tokens)),
                *(access for weight in weights[2:] for access in matrix(weight)),
                write(act.view.part(first * top_k * act.shape[1] * FLOAT, tokens * top_k * act.shape[1] * FLOAT)),
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
    parts = [_scratch(plan, *act.shape) for _ in GATED]
    for role, part in zip(GATED, parts, strict=True):
        _gemv_of_choices(op, plan, h, ids, op.weight(role), part, choices=op.shape["top_k"])
    shared = [_scratch(plan, *shared_act.shape) for _ in SHARED]
    encode_gemv_of(Projection(h, None, [(op.weight(role), y) for role, y in zip(SHARED, shared, strict=True)]), plan)
    _activate(plan, parts[0].view, parts[1].view, act.view)
    _activate(plan, shared[0].view, shared[1].view, shared_act.view)


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
                *_routed(op, weight, tokens),
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
                *_routed(op, down, tokens),
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
    y = _scratch(plan, op.shape["rows"] * op.shape["top_k"], op.shape["hidden"])
    _gemv_of_choices(op, plan, op.tensor("act"), op.tensor("ids"), op.weight("down"), y, choices=1)
    shared = _scratch(plan, *x.shape)
    encode_gemv_of(Projection(op.tensor("shared_act"), None, [(op.weight("shared_down"), shared)]), plan)
    _sum(op, plan, y, shared, None)


def _sum(op: Op, plan: Plan, y: Tensor, shared: Tensor, inverse: Tensor | None) -> None:
    """``x += Σ weight · y + weight · shared``; ``y`` is sorted by expert where ``inverse`` is given."""
    rows, hidden = op.shape["rows"], op.shape["hidden"]
    tasks = rows * -(-hidden // SUM_TASK)
    plan.dispatch(
        "experts_sum",
        [
            *(read(tensor.view) for tensor in (y, shared, op.tensor("weights"))),
            read(empty_like(y.view) if inverse is None else inverse.view),
            update(op.tensor("x").view),
        ],
        constants=struct.pack("<4I", rows, op.shape["top_k"], hidden, int(inverse is not None)),
        tasks=tasks,
        threads=grain(tasks, SUM_TASK * FLOAT * (op.shape["top_k"] + 3)),
    )


def _task_rows(width: int) -> int:
    """Outputs of a grouped task: half an expert if that's several blocks, as each task packs the rows for itself."""
    return padded(width if width < 4 * PAIR_ROWS else -(-width // 2), PAIR_ROWS)


def _token_block(rows: int, tile_rows: int) -> int:
    return min(PACKED_TOKENS, padded(rows, tile_rows))


def encode_in_grouped(op: Op, plan: Plan, tile_rows: int) -> None:
    """One dispatch: gate, up and activation of every expert over its rows, and of the shared expert over all."""
    shape, rows = op.shape, op.shape["rows"]
    weights = [op.weight(role) for role in (*GATED, *SHARED)]
    width, shared_width = weights[0].rows, weights[2].rows
    task_rows, token_block = _task_rows(width), _token_block(rows, tile_rows)
    tasks = shape["experts"] * -(-width // task_rows) + -(-rows // token_block) * -(-shared_width // task_rows)
    plan.dispatch(
        "experts_in_grouped",
        [
            *(read(op.tensor(role).view) for role in ("h", "offsets", "order")),
            *(access for weight in weights[:2] for access in _routed(op, weight, rows)),
            *(access for weight in weights[2:] for access in matrix(weight)),
            *(write(op.tensor(role).view) for role in ("act", "shared_act")),
        ],
        constants=struct.pack("<6I", rows, shape["top_k"], tile_rows, task_rows, token_block, 0)
        + b"".join(map(pack_matrix, weights)),
        tasks=tasks,
        worker_bytes=gemm_bytes(2 * token_block, shape["hidden"]),
    )


def encode_in_grouped_split(op: Op, plan: Plan, tile_rows: int) -> None:
    """Grouped GEMMs for gate and up, GEMMs for the shared expert, and the activations."""
    h, act, shared_act = (op.tensor(role) for role in ("h", "act", "shared_act"))
    parts = [_scratch(plan, *act.shape) for _ in GATED]
    for role, part in zip(GATED, parts, strict=True):
        _grouped(op, plan, h, op.weight(role), part, tile_rows, gather=True)
    shared = [_scratch(plan, *shared_act.shape) for _ in SHARED]
    projection = Projection(h, None, [(op.weight(role), y) for role, y in zip(SHARED, shared, strict=True)])
    encode_gemm_of(projection, plan, tile_rows)
    _activate(plan, parts[0].view, parts[1].view, act.view)
    _activate(plan, shared[0].view, shared[1].view, shared_act.view)


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
            *_routed(op, weight, rows),
            write(y.view),
        ],
        constants=struct.pack("<6I", rows, op.shape["top_k"], tile_rows, task_rows, token_block, int(gather))
        + pack_matrix(weight),
        tasks=experts * -(-weight.rows // task_rows),
        worker_bytes=gemm_bytes(token_block, weight.cols),
    )


def encode_out_grouped(op: Op, plan: Plan, tile_rows: int) -> None:
    """A dispatch that packs the activations, then one whose tasks each add all experts to some columns of x."""
    down, shared_down = op.weight("down"), op.weight("shared_down")
    rows, top_k, experts = op.shape["rows"], op.shape["top_k"], op.shape["experts"]
    slots = rows * top_k
    # Each expert that has rows fills up its last vector.
    panel_floats = (slots + (WIDEST - 1) * min(experts, slots)) * padded(down.cols, 128)
    panels = plan.scratch(FLOAT * (panel_floats + padded(rows, WIDEST) * padded(shared_down.cols, 128)))
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
            *_routed(op, down, rows),
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
    y = _scratch(plan, op.shape["rows"] * op.shape["top_k"], op.shape["hidden"])
    _grouped(op, plan, op.tensor("act"), op.weight("down"), y, tile_rows, gather=False)
    shared = _scratch(plan, *x.shape)
    projection = Projection(op.tensor("shared_act"), None, [(op.weight("shared_down"), shared)])
    encode_gemm_of(projection, plan, tile_rows)
    _sum(op, plan, y, shared, op.tensor("inverse"))


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
