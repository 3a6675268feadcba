"""CPU variants of Gated DeltaNet: prepare, one step, and the scan of a chunk, direct or blockwise (model_spec §6)."""

from __future__ import annotations

import struct

from lily.ops import Op
from lily.plan import Access, Plan, View, read, update, write
from lily.registry import KernelVariant, Option

__all__ = ["VARIANTS"]

LANES = 16
"""The widest vector of any instruction set: heads are whole vectors of it."""
MAX_HEAD_DIM = 256
"""``kMaxDeltaHead`` of kernels/cpu/deltanet.h."""
PREPARE_GRAIN = 8
"""Heads that neighbour in memory and are walked together, row by row."""
FLOAT = 4


def head_fits(op: Op) -> bool:
    """Whether the kernels' vectors and stack arrays fit the heads."""
    dim = op.shape["head_dim"]
    return dim % LANES == 0 and dim <= MAX_HEAD_DIM and op.shape["value_heads"] % op.shape["key_heads"] == 0


REQUIREMENT = f"a head size that is a multiple of {LANES} up to {MAX_HEAD_DIM}, and value heads a multiple of key heads"


def encode_prepare(op: Op, plan: Plan) -> None:
    """One dispatch; a task is one head of q, k or v."""
    shape = op.shape
    heads = 2 * shape["key_heads"] + shape["value_heads"]
    plan.dispatch(
        "deltanet_prepare",
        [
            *(read(op.tensor(role).view) for role in ("qkv", "a", "b")),
            update(op.tensor("conv_state").view),
            *(read(op.tensor(role).view) for role in ("conv_weight", "A_log", "dt_bias")),
            *(write(op.tensor(role).view) for role in ("q", "k", "v", "decay", "beta")),
        ],
        constants=struct.pack("<4I", shape["rows"], shape["key_heads"], shape["value_heads"], shape["head_dim"]),
        tasks=heads,
        threads=PREPARE_GRAIN,
    )


def encode_step_fused(op: Op, plan: Plan) -> None:
    """One dispatch; a task is a value head: its state passes once, then its output is normed."""
    plan.dispatch(
        "deltanet_step_fused",
        [*_recurrence(op), *(read(op.tensor(role).view) for role in ("z", "norm")), write(op.tensor("y").view)],
        constants=_constants(op, 1),
        tasks=op.shape["value_heads"],
    )


def encode_split(op: Op, plan: Plan) -> None:
    """Two dispatches: the recurrence over blocks of state rows, then the gated norm."""
    parts = _parts(op, least_tasks=32, least_rows=16)
    plan.dispatch(
        "deltanet_scan",
        [*_recurrence(op), write(op.tensor("y").view)],
        constants=_constants(op, parts),
        tasks=op.shape["value_heads"] * parts,
    )
    _gated_norm(op, plan)


def encode_scan_blockwise(op: Op, plan: Plan, block: int) -> None:
    """Two dispatches: the WY form over blocks of tokens, then the gated norm."""
    # Each part repeats the products of keys with keys, so parts are few.
    parts = _parts(op, least_tasks=8, least_rows=32)
    dim = op.shape["head_dim"]
    columns = dim // parts
    floats = dim * columns + dim * block + 2 * block * block + block * columns + 2 * block
    plan.dispatch(
        "deltanet_scan_blockwise",
        [*_recurrence(op), write(op.tensor("y").view)],
        constants=struct.pack("<6I", *_sizes(op), parts, block),
        tasks=op.shape["value_heads"] * parts,
        worker_bytes=floats * FLOAT,
    )
    _gated_norm(op, plan)


def _sizes(op: Op) -> tuple[int, int, int, int]:
    shape = op.shape
    return shape["rows"], shape["key_heads"], shape["value_heads"], shape["head_dim"]


def _constants(op: Op, parts: int) -> bytes:
    return struct.pack("<5If", *_sizes(op), parts, op.params["eps"])


def _recurrence(op: Op) -> list[Access]:
    inputs = [read(op.tensor(role).view) for role in ("q", "k", "v", "decay", "beta")]
    return [*inputs, update(op.tensor("state").view)]


def _parts(op: Op, least_tasks: int, least_rows: int) -> int:
    """How many tasks share a head, so that there are tasks enough to balance and rows enough to share a key."""
    parts = 1
    while op.shape["value_heads"] * parts < least_tasks and op.shape["head_dim"] % (2 * parts * least_rows) == 0:
        parts *= 2
    return parts


def _gated_norm(op: Op, plan: Plan) -> None:
    view: View = op.tensor("y").view
    plan.dispatch(
        "deltanet_gated_norm",
        [update(view), read(op.tensor("z").view), read(op.tensor("norm").view)],
        constants=_constants(op, 1),
        tasks=op.shape["rows"],
        threads=4,
    )


VARIANTS: list[KernelVariant] = [
    KernelVariant(
        op="deltanet.prepare",
        name="by_head",
        host="cpu",
        encode=encode_prepare,
        summary="one dispatch; a task walks the rows of one head's channels",
        accepts=head_fits,
        requirement=REQUIREMENT,
    ),
    KernelVariant(
        op="deltanet.step",
        name="fused",
        host="cpu",
        encode=encode_step_fused,
        summary="recurrent update and gated norm in one dispatch",
        accepts=head_fits,
        requirement=REQUIREMENT,
    ),
    KernelVariant(
        op="deltanet.step",
        name="split",
        host="cpu",
        encode=encode_split,
        summary="recurrent update, then gated norm",
        accepts=head_fits,
        requirement=REQUIREMENT,
    ),
    KernelVariant(
        op="deltanet.scan",
        name="direct",
        host="cpu",
        encode=encode_split,
        summary="token by token, the state's rows held in cache",
        accepts=head_fits,
        requirement=REQUIREMENT,
    ),
    KernelVariant(
        op="deltanet.scan",
        name="blockwise",
        host="cpu",
        encode=encode_scan_blockwise,
        summary="a block of tokens at a time, by matrix products and a triangular solve",
        accepts=head_fits,
        requirement=REQUIREMENT,
        options={"block": Option(64, (32, 64), "tokens a block")},
    ),
]
