"""What the expert variants have in common: how a stack is bound, and the elementwise halves of the split forms."""

from __future__ import annotations

import struct

from lily.ops import Op, Tensor, Weight
from lily.plan import Access, Plan, View, read, update, write
from lily_builtin.cpu_matrix import FLOAT, grain
from lily_builtin.encoding import empty_like, matrix

__all__ = ["activate", "routed", "scratch", "weighted_sum"]

ACTIVATION_TASK, SUM_TASK = 1024, 256
"""Elements of a task of silu_multiply, and columns of one of experts_sum."""


def routed(op: Op, weight: Weight, tokens: int) -> list[Access]:
    """A stack of experts of which a step reads those that its rows chose."""
    chosen = min(op.shape["experts"], tokens * op.shape["top_k"])
    return matrix(weight, weight.moved(chosen))


def scratch(plan: Plan, rows: int, cols: int) -> Tensor:
    return Tensor(plan.scratch(rows * cols * FLOAT), (rows, cols))


def activate(plan: Plan, gate: View, up: View, out: View) -> None:
    count = out.nbytes // FLOAT
    tasks = -(-count // ACTIVATION_TASK)
    plan.dispatch(
        "silu_multiply",
        [read(gate), read(up), write(out)],
        constants=struct.pack("<2I", count, 0),
        tasks=tasks,
        threads=grain(tasks, ACTIVATION_TASK * 3 * FLOAT),
    )


def weighted_sum(op: Op, plan: Plan, y: Tensor, shared: Tensor, inverse: Tensor | None) -> None:
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
