"""The table of ops: for each one its phases, the shape keys that policies may test, its operands and parameters.

It is the contract between the model (which emits ops), the policy (whose rules name ops and shape keys) and the
variants (which encode them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["OPS", "OpSpec", "Phase"]

Phase: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True)
class OpSpec:
    """What one op is: shape keys that policies may test, operand roles, parameters.

    A role that ends in ``?`` may be absent.
    """

    name: str
    phases: tuple[Phase, ...]
    summary: str
    shape: Mapping[str, str]
    operands: Mapping[str, str]
    params: Mapping[str, str] = field(default_factory=dict)


_ROWS = {"rows": "tokens in this step"}
_DELTA = {
    "rows": "tokens in this step",
    "key_heads": "DeltaNet query/key heads",
    "value_heads": "DeltaNet value heads",
    "head_dim": "DeltaNet head size",
}
_ATTENTION = {
    "rows": "tokens in this step",
    "context": "tokens in the cache after this step, at least",
    "heads": "query heads",
    "kv_heads": "key/value heads",
    "head_dim": "head size",
    "gqa_group": "query heads that share one key/value head",
}
_CACHE = {
    "step": "i32 step parameters; word 0 is the position of the first row",
    "pages": "i32 [max_pages] page table of the session",
    "k_cache": "[pages, kv_heads, page_tokens, head_dim] roped keys of this layer",
    "v_cache": "[pages, kv_heads, page_tokens, head_dim] values of this layer",
}
_MOE = {
    "rows": "tokens in this step",
    "experts": "routed experts",
    "top_k": "experts a token",
    "hidden": "model width",
    "expert_width": "inner width of a routed expert",
    "rows_per_expert": "rows × top_k / experts, rounded down",
}


def _spec(
    name: str,
    phases: tuple[Phase, ...],
    summary: str,
    shape: Mapping[str, str],
    operands: Mapping[str, str],
    params: Mapping[str, str] | None = None,
) -> OpSpec:
    return OpSpec(name, phases, summary, shape, operands, params or {})


def _by_phase(*rows: tuple[str, Phase, str]) -> tuple[tuple[str, Phase, str], ...]:
    """Name, phase and summary of ops that differ in their phase alone."""
    return rows


_BOTH: tuple[Phase, ...] = ("prefill", "decode")

OPS: Mapping[str, OpSpec] = {
    spec.name: spec
    for spec in (
        _spec(
            "embed",
            _BOTH,
            "rows of the embedding table",
            {**_ROWS, "hidden": "model width", "bits": "stored bits a weight"},
            {"tokens": "i32 [rows]", "table": "weight [vocab, hidden]", "x": "out [rows, hidden]"},
        ),
        _spec(
            "linear",
            _BOTH,
            "dense projections of one input, with an optional RMS norm before and residual sum after",
            {
                **_ROWS,
                "in_features": "columns of the weights",
                "out_features": "rows of all the weights together",
                "bits": "stored bits a weight, the least of the parts",
                "parts": "matrices that share the input",
            },
            {
                "x": "[rows, in_features]",
                "norm?": "f32 [in_features], multiplier of the RMS norm of x",
                **{f"w{i}{'' if i == 0 else '?'}": "weight [n, in_features]" for i in range(4)},
                **{
                    f"y{i}{'' if i == 0 else '?'}": "out [rows, n]; with residual, updated in place: y += x @ wᵀ"
                    for i in range(4)
                },
            },
            {"eps": "of the norm", "residual": "1: add to y0 instead of overwriting it"},
        ),
        _spec(
            "deltanet.prepare",
            _BOTH,
            "causal convolution and SiLU, l2 norm of q and k, decay and beta (model_spec §6, steps 2 to 4)",
            _DELTA,
            {
                "qkv": "[rows, 2·key_heads·head_dim + value_heads·head_dim]",
                "a": "[rows, value_heads]",
                "b": "[rows, value_heads]",
                "conv_state": "f32 [3, channels], the last inputs of the convolution, updated",
                "conv_weight": "f32 [channels, 4]",
                "A_log": "f32 [value_heads]",
                "dt_bias": "f32 [value_heads]",
                "q": "out [rows, key_heads, head_dim], scaled by head_dim^-1/2",
                "k": "out [rows, key_heads, head_dim]",
                "v": "out [rows, value_heads, head_dim]",
                "decay": "out f32 [rows, value_heads]",
                "beta": "out f32 [rows, value_heads]",
            },
        ),
        *(
            _spec(
                name,
                (phase,),
                summary,
                _DELTA,
                {
                    "q": "[rows, key_heads, head_dim]",
                    "k": "[rows, key_heads, head_dim]",
                    "v": "[rows, value_heads, head_dim]",
                    "decay": "f32 [rows, value_heads]",
                    "beta": "f32 [rows, value_heads]",
                    "z": "[rows, value_heads, head_dim]",
                    "norm": "f32 [head_dim]",
                    "state": "f32 [value_heads, head_dim, head_dim] (value × key), updated",
                    "y": "out [rows, value_heads·head_dim]",
                },
                {"eps": "of the gated norm"},
            )
            for name, phase, summary in _by_phase(
                (
                    "deltanet.step",
                    "decode",
                    "recurrent update of one token, then gated norm (model_spec §6, steps 6 and 7)",
                ),
                (
                    "deltanet.scan",
                    "prefill",
                    "the recurrence over a chunk, then gated norm (model_spec §6, steps 6 and 7)",
                ),
            )
        ),
        _spec(
            "attention.prepare",
            _BOTH,
            "q/k norm, rotary embedding, cache write, output-gate split (model_spec §5, steps 1 to 3)",
            {key: _ATTENTION[key] for key in ("rows", "heads", "kv_heads", "head_dim")},
            {
                "u": "[rows, heads, 2·head_dim]: query then gate of each head",
                "k": "[rows, kv_heads, head_dim]",
                "v": "[rows, kv_heads, head_dim]",
                "q_norm": "f32 [head_dim]",
                "k_norm": "f32 [head_dim]",
                "q": "out [rows, heads, head_dim]",
                "gate": "out [rows, heads, head_dim]",
                **_CACHE,
            },
            {"eps": "of the norms", "theta": "rotary base", "rotary_dim": "leading dimensions that rotate"},
        ),
        *(
            _spec(
                name,
                (phase,),
                summary,
                _ATTENTION,
                {
                    "q": "[rows, heads, head_dim]",
                    "gate": "[rows, heads, head_dim]",
                    "y": "out [rows, heads·head_dim]: attention × σ(gate)",
                    **_CACHE,
                },
            )
            for name, phase, summary in _by_phase(
                (
                    "attention.prefill",
                    "prefill",
                    "causal attention of a chunk over the cache, times σ(gate) (model_spec §5, step 4)",
                ),
                (
                    "attention.decode",
                    "decode",
                    "attention of one token over the cache, times σ(gate) (model_spec §5, step 4)",
                ),
            )
        ),
        _spec(
            "moe.route",
            _BOTH,
            "RMS norm, router scores, softmax, top-k, normalised weights, shared-expert gate (model_spec §7)",
            _MOE,
            {
                "x": "[rows, hidden]",
                "norm": "f32 [hidden]",
                "gate": "weight [experts, hidden]",
                "shared_gate": "weight [1, hidden]",
                "h": "out [rows, hidden], x after the norm",
                "ids": "out i32 [rows, top_k], best first, ties by lowest id",
                "weights": "out f32 [rows, top_k + 1]; the last is σ of the shared gate",
            },
            {"eps": "of the norm"},
        ),
        _spec(
            "moe.group",
            ("prefill",),
            "rows sorted by expert: histogram, prefix scan, scatter, block map",
            _MOE,
            {
                "ids": "i32 [rows, top_k]",
                "offsets": "out i32 [experts + 1], first sorted row of each expert",
                "order": "out i32 [rows·top_k], for each sorted row its row·top_k + choice, stable",
                "inverse": "out i32 [rows·top_k], for each row·top_k + choice its sorted row",
                "blocks": "out i32 [max_blocks, 3] of (expert, first sorted row, rows); rows 0 ends the list",
            },
            {"tile_rows": "rows a block holds at most: the tile of the experts_in variant chosen for this shape"},
        ),
        _spec(
            "moe.experts_in",
            _BOTH,
            "gate and up projections and gated activation of routed and shared experts (model_spec §7)",
            _MOE,
            {
                "h": "[rows, hidden]",
                "ids": "i32 [rows, top_k]",
                **{f"{role}?": "prefill: see moe.group" for role in ("offsets", "order", "blocks")},
                "gate": "weight [experts, expert_width, hidden]",
                "up": "weight [experts, expert_width, hidden]",
                "shared_gate": "weight [shared_width, hidden]",
                "shared_up": "weight [shared_width, hidden]",
                "act": "out [rows·top_k, expert_width]; row·top_k + choice in decode, sorted by expert in prefill",
                "shared_act": "out [rows, shared_width]",
            },
        ),
        _spec(
            "moe.experts_out",
            _BOTH,
            "down projections, routing weights, shared expert, residual (model_spec §7)",
            _MOE,
            {
                "act": "[rows·top_k, expert_width], see moe.experts_in",
                "shared_act": "[rows, shared_width]",
                "ids": "i32 [rows, top_k]",
                **{f"{role}?": "prefill: see moe.group" for role in ("offsets", "inverse", "blocks")},
                "weights": "f32 [rows, top_k + 1]",
                "down": "weight [experts, hidden, expert_width]",
                "shared_down": "weight [hidden, shared_width]",
                "x": "[rows, hidden], updated: x += Σ weight·down(act) + shared",
            },
        ),
        _spec(
            "logits",
            _BOTH,
            "final RMS norm and output projection",
            {
                **_ROWS,
                "hidden": "model width",
                "vocab": "rows of the output projection",
                "bits": "stored bits a weight",
            },
            {
                "x": "[rows, hidden]",
                "norm": "f32 [hidden]",
                "head": "weight [vocab, hidden]",
                "logits": "out f32 [rows, vocab]",
            },
            {"eps": "of the norm"},
        ),
        _spec(
            "sample",
            _BOTH,
            "next token from the last row of logits; advances the step parameters. The draw is the inverse CDF "
            "in id order, at 53 bits of the first two words of Philox4x32-10 with the seed as key and count as counter",
            {"rows": "tokens in this step", "vocab": "rows of the output projection"},
            {
                "logits": "f32 [vocab]",
                "mask": "u8 [vocab], 0 where an id has no token",
                "counts": "i32 [2, vocab]: times seen in the context, times generated; updated",
                "step": "step parameters, updated: see lily/step.py",
            },
            {"advance": "tokens by which the position moves on"},
        ),
    )
}
