"""The CPU variant of sampling: one dispatch that draws the next token and advances the step parameters."""

from __future__ import annotations

import struct

from lily.ops import Op
from lily.plan import Plan, read, update, write
from lily.registry import KernelVariant

__all__ = ["VARIANTS"]

PADDING = 64
"""``kPadding`` of kernels/cpu/sample.cc: scratch arrays hold a multiple of it."""
ARRAYS = 4
"""Scores, weights, ids and room to rank, four bytes each."""


def encode_device(op: Op, plan: Plan) -> None:
    """One dispatch of one task.

    Penalties (repetition as a factor on ids seen in the context, presence and frequency subtracted from ids
    generated), the mask, temperature, top-k, top-p and min-p follow each other, each on what the one before it left,
    renormalised. Temperature 0 takes the largest logit, the lowest id of equals. The draw inverts the cumulative
    distribution in order of id at a number that Philox4x32-10 makes from the seed and ``step.count``. NaN is never
    chosen; where no id is left, the lowest that has a token is taken.
    """
    vocab = op.shape["vocab"]
    counts = op.tensor("counts").view
    # Greedy without penalties, the most frequent use, touches neither counts but one nor scratch.
    plan.dispatch(
        "sample",
        [
            read(op.tensor("logits").view),
            read(op.tensor("mask").view),
            update(counts, 8),
            update(op.tensor("step").view),
            write(plan.scratch(ARRAYS * 4 * -(-vocab // PADDING) * PADDING), 0),
        ],
        constants=struct.pack("<2I", vocab, int(op.params["advance"])),
        tasks=1,
    )


VARIANTS: list[KernelVariant] = [
    KernelVariant(
        op="sample",
        name="device",
        host="cpu",
        encode=encode_device,
        summary="penalties, filters and the draw in one dispatch",
    ),
]
