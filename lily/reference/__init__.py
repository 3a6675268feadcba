"""The float64 oracle: one pure numpy function for each op, and the whole model built from them.

Nothing here is fast, and nothing here is used to generate text. Every kernel variant is held
against these functions, and these functions against other engines (``tests/test_reference.py``,
``tests/test_peers.py``).
"""

from __future__ import annotations

from lily.reference.bfloat16 import as_float64, bfloat16_bits, bfloat16_values, round_bfloat16
from lily.reference.deltanet import (
    deltanet_blockwise,
    deltanet_prepare,
    deltanet_recurrence,
    gated_norm,
)
from lily.reference.dense import (
    dequantize,
    embed,
    linear,
    logits,
    rms_norm,
    sigmoid,
    silu,
    softmax,
    softplus,
)
from lily.reference.full_attention import attention, attention_prepare, gate_output, rope
from lily.reference.model import ReferenceModel, ReferenceState
from lily.reference.moe import (
    Grouping,
    experts_in,
    experts_out,
    group,
    route,
    shared_expert_in,
    shared_expert_scale,
)
from lily.reference.sampling import greedy, penalise, sample_distribution

__all__ = [
    "Grouping",
    "ReferenceModel",
    "ReferenceState",
    "as_float64",
    "attention",
    "attention_prepare",
    "bfloat16_bits",
    "bfloat16_values",
    "deltanet_blockwise",
    "deltanet_prepare",
    "deltanet_recurrence",
    "dequantize",
    "embed",
    "experts_in",
    "experts_out",
    "gate_output",
    "gated_norm",
    "greedy",
    "group",
    "linear",
    "logits",
    "penalise",
    "rms_norm",
    "rope",
    "round_bfloat16",
    "route",
    "sample_distribution",
    "shared_expert_in",
    "shared_expert_scale",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
]
