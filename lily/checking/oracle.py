"""Each op's outputs by the float64 oracle (:mod:`lily.reference`), with the error that float32 arithmetic may make.

Tolerances are in units that an output's :class:`~lily.checking.expected.Expected` carries: the sum of the magnitudes of
what is added up to get it, carried through what follows. One float32 rounding is 6e-8 of that; a kernel makes a few
dozen to a few hundred of them in a row, of either sign. A term that is lost or taken twice among a few thousand is 100
times the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lily.checking import deltanet, dense, full_attention, moe, sampling
from lily.checking.outcome import Judge
from lily.checking.problem import Problem

__all__ = ["judge"]

_JUDGES: Mapping[str, Callable[[Problem], Judge]] = {
    "embed": dense.judge_embed,
    "linear": dense.judge_linear,
    "deltanet.prepare": deltanet.judge_prepare,
    "deltanet.step": deltanet.judge_recurrence,
    "deltanet.scan": deltanet.judge_recurrence,
    "attention.prepare": full_attention.judge_prepare,
    "attention.prefill": full_attention.judge_attention,
    "attention.decode": full_attention.judge_attention,
    "moe.route": moe.judge_route,
    "moe.group": moe.judge_group,
    "moe.experts_in": moe.judge_experts_in,
    "moe.experts_out": moe.judge_experts_out,
    "logits": dense.judge_logits,
    "sample": sampling.judge_sample,
}


def judge(problem: Problem) -> Judge:
    """Evaluate the oracle on a problem's operands."""
    return _JUDGES[problem.op.name](problem)
