"""An op for a case: random operands of realistic magnitude, placed in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lily.checking import deltanet, dense, full_attention, moe, sampling
from lily.checking.case import Case, shape_of
from lily.checking.memory import Memory
from lily.checking.problem import Builder, Built, Problem
from lily.ops import Op

__all__ = ["build"]

_BUILDERS: Mapping[str, Callable[[Builder], Built]] = {
    "embed": dense.build_embed,
    "linear": dense.build_linear,
    "deltanet.prepare": deltanet.build_prepare,
    "deltanet.step": deltanet.build_recurrence,
    "deltanet.scan": deltanet.build_recurrence,
    "attention.prepare": full_attention.build_prepare,
    "attention.prefill": full_attention.build_attention,
    "attention.decode": full_attention.build_attention,
    "moe.route": moe.build_route,
    "moe.group": moe.build_group,
    "moe.experts_in": moe.build_experts_in,
    "moe.experts_out": moe.build_experts_out,
    "logits": dense.build_logits,
    "sample": sampling.build_sample,
}


def build(case: Case, *, activation_dtype: str = "f32", unaligned: bool = True) -> Problem:
    """The case's op with operands; the same ones every time.

    Args:
        activation_dtype: of the host it will run on.
        unaligned: let weights start at any byte, as in a mapped checkpoint.
    """
    memory = Memory(activation_dtype, skew=case.seed % 8 if unaligned else 0)
    builder = Builder(case, memory)
    operands, params = _BUILDERS[case.op](builder)
    memory.compact()
    op = Op(case.op, case.phase, case.name, shape_of(case), operands, params)
    return Problem(case, op, memory, builder.pages)
