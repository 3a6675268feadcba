"""The model as a list of ops: one step of Qwen3.5/3.6 MoE, for a prefill chunk or a decode step (model_spec §4–§7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lily.binding import Binder
from lily.config import ModelConfig
from lily.errors import ConfigError
from lily.memory import KvPool, StateLayout
from lily.ops import Op, Operand, Phase, Tensor
from lily.plan import View
from lily.recorder import Recorder
from lily.weights import FullAttentionWeights, LayerWeights, LinearAttentionWeights, Matrix, ModelWeights, Vector

__all__ = ["StepShape", "emit_step", "require_supported"]

Outputs = Literal["none", "last", "all", "sample"]


@dataclass(frozen=True)
class StepShape:
    """What a plan is recorded for.

    Attributes:
        rows: tokens.
        context: tokens in the cache after the step, at least; variants may switch on it.
        outputs: ``none``, logits of the ``last`` row or of ``all``, or a ``sample`` from the last.
    """

    phase: Phase
    rows: int
    context: int
    outputs: Outputs


def require_supported(config: ModelConfig) -> None:
    """Refuse head sizes that the DeltaNet ops don't describe.

    Raises:
        ConfigError: keys and values of the DeltaNet layers differ in head size.
    """
    if config.linear_key_head_dim != config.linear_value_head_dim:
        raise ConfigError(
            f"{config.source}: linear_key_head_dim is {config.linear_key_head_dim} and linear_value_head_dim is "
            f"{config.linear_value_head_dim}; this engine needs them equal"
        )


def emit_step(
    recorder: Recorder, weights: ModelWeights, pool: KvPool, layout: StateLayout, shape: StepShape, max_pages: int
) -> None:
    """Append every op of one step to the recorder's plan."""
    _Step(recorder, weights, pool, layout, shape, max_pages).emit()


class _Step:
    def __init__(
        self,
        recorder: Recorder,
        weights: ModelWeights,
        pool: KvPool,
        layout: StateLayout,
        shape: StepShape,
        max_pages: int,
    ) -> None:
        self.recorder = recorder
        self.weights = weights
        self.config = weights.config
        self.pool = pool
        self.layout = layout
        self.shape = shape
        self.slots = recorder.slots
        self.bind = Binder(recorder.slots)
        self.step = Tensor(self.slots.step_view(), (self.slots.step_view().nbytes // 4,), "i32")
        self.pages = Tensor(View(self.slots.pages, 0, max_pages * 4), (max_pages,), "i32")
        c, rows = self.config, shape.rows
        tensor = recorder.tensor
        self.x = tensor(rows, c.hidden_size)
        self.h = tensor(rows, c.hidden_size)
        self.mixed = tensor(rows, max(c.value_dim, c.query_dim))
        self.routes = rows * c.num_experts_per_tok
        self.ids = tensor(rows, c.num_experts_per_tok, dtype="i32")
        self.route_weights = tensor(rows, c.num_experts_per_tok + 1, dtype="f32")
        self.act = tensor(self.routes, c.moe_intermediate_size)
        self.shared_act = tensor(rows, c.shared_expert_intermediate_size)

    def emit(self) -> None:
        c = self.config
        self._op(
            "embed",
            "embed_tokens",
            {"hidden": c.hidden_size, "bits": self.bind.weight(self.weights.embed_tokens).bits},
            {"tokens": self._tokens(), "table": self.bind.weight(self.weights.embed_tokens), "x": self.x},
        )
        linear = full = 0
        for i, layer in enumerate(self.weights.layers):
            self.recorder.begin_layer()
            if isinstance(layer.mixer, FullAttentionWeights):
                self._attention(i, full, layer, layer.mixer)
                full += 1
            else:
                self._deltanet(i, linear, layer, layer.mixer)
                linear += 1
            self._moe(i, layer)
        if self.shape.outputs != "none":
            self._outputs()

    def _tokens(self) -> Tensor:
        if self.shape.phase == "decode":
            return Tensor(self.slots.step_view("token"), (1,), "i32")
        return Tensor(View(self.slots.tokens, 0, self.shape.rows * 4), (self.shape.rows,), "i32")

    def _deltanet(self, i: int, index: int, layer: LayerWeights, mixer: LinearAttentionWeights) -> None:
        c, rows = self.config, self.shape.rows
        qkv, z = self.recorder.layer_tensor(rows, c.conv_dim), self.recorder.layer_tensor(rows, c.value_dim)
        b, a = (self.recorder.layer_tensor(rows, c.linear_num_value_heads) for _ in range(2))
        self._linear(
            f"layers.{i}.linear_attn.in_proj",
            self.x,
            [(mixer.in_proj_qkv, qkv), (mixer.in_proj_z, z), (mixer.in_proj_b, b), (mixer.in_proj_a, a)],
            norm=layer.input_layernorm,
        )
        head = c.linear_key_head_dim
        shape = {"key_heads": c.linear_num_key_heads, "value_heads": c.linear_num_value_heads, "head_dim": head}
        q, k = (self.recorder.layer_tensor(rows, c.linear_num_key_heads, head) for _ in range(2))
        v = self.recorder.layer_tensor(rows, c.linear_num_value_heads, head)
        decay, beta = (self.recorder.layer_tensor(rows, c.linear_num_value_heads, dtype="f32") for _ in range(2))
        self._op(
            "deltanet.prepare",
            f"layers.{i}.linear_attn.prepare",
            shape,
            {
                "qkv": qkv,
                "a": a,
                "b": b,
                "conv_state": self.layout.conv(self.slots.state, index),
                "conv_weight": self.bind.vector(mixer.conv1d, c.conv_dim, c.linear_conv_kernel_dim),
                "A_log": self.bind.vector(mixer.A_log),
                "dt_bias": self.bind.vector(mixer.dt_bias),
                **{"q": q, "k": k, "v": v, "decay": decay, "beta": beta},
            },
        )
        y = Tensor(self.mixed.view.part(0, v.view.nbytes), (rows, c.value_dim), v.dtype)
        decode = self.shape.phase == "decode"
        self._op(
            "deltanet.step" if decode else "deltanet.scan",
            f"layers.{i}.linear_attn.{'step' if decode else 'scan'}",
            shape,
            {
                **{"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "z": z, "y": y},
                "norm": self.bind.vector(mixer.norm),
                "state": self.layout.recurrent(self.slots.state, index),
            },
            {"eps": c.rms_norm_eps},
        )
        self._linear(f"layers.{i}.linear_attn.out_proj", y, [(mixer.out_proj, self.x)], residual=True)

    def _attention(self, i: int, index: int, layer: LayerWeights, mixer: FullAttentionWeights) -> None:
        c, rows = self.config, self.shape.rows
        heads, kv_heads, head = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        u = self.recorder.layer_tensor(rows, heads, 2 * head)
        k, v = (self.recorder.layer_tensor(rows, kv_heads, head) for _ in range(2))
        self._linear(
            f"layers.{i}.self_attn.in_proj",
            self.x,
            [(mixer.q_proj, u), (mixer.k_proj, k), (mixer.v_proj, v)],
            norm=layer.input_layernorm,
        )
        q, gate = (self.recorder.layer_tensor(rows, heads, head) for _ in range(2))
        k_cache, v_cache = self.pool.tensors(self.slots.kv, index)
        cache: dict[str, Operand] = {"step": self.step, "pages": self.pages, "k_cache": k_cache, "v_cache": v_cache}
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head}
        self._op(
            "attention.prepare",
            f"layers.{i}.self_attn.prepare",
            shape,
            {
                **{"u": u, "k": k, "v": v, "q": q, "gate": gate},
                "q_norm": self.bind.vector(mixer.q_norm),
                "k_norm": self.bind.vector(mixer.k_norm),
                **cache,
            },
            {"eps": c.rms_norm_eps, "theta": c.rope_theta, "rotary_dim": c.rotary_dim},
        )
        y = Tensor(self.mixed.view.part(0, q.view.nbytes), (rows, c.query_dim), q.dtype)
        self._op(
            f"attention.{self.shape.phase}",
            f"layers.{i}.self_attn.{self.shape.phase}",
            {**shape, "context": self.shape.context, "gqa_group": c.gqa_group},
            {"q": q, "gate": gate, "y": y, **cache},
        )
        self._linear(f"layers.{i}.self_attn.o_proj", y, [(mixer.o_proj, self.x)], residual=True)

    def _moe(self, i: int, layer: LayerWeights) -> None:
        c, moe = self.config, layer.moe
        shape = {
            "experts": c.num_experts,
            "top_k": c.num_experts_per_tok,
            "hidden": c.hidden_size,
            "expert_width": c.moe_intermediate_size,
            "rows_per_expert": self.routes // c.num_experts,
        }
        self._op(
            "moe.route",
            f"layers.{i}.mlp.route",
            shape,
            {
                **{"x": self.x, "h": self.h, "ids": self.ids, "weights": self.route_weights},
                "norm": self.bind.vector(layer.post_attention_layernorm),
                "gate": self.bind.weight(moe.gate),
                "shared_gate": self.bind.weight(moe.shared_expert_gate),
            },
            {"eps": c.rms_norm_eps},
        )
        groups = self._groups() if self.shape.phase == "prefill" else {}
        experts_in = self._make(
            "moe.experts_in",
            f"layers.{i}.mlp.experts_in",
            shape,
            {
                **{"h": self.h, "ids": self.ids, "act": self.act, "shared_act": self.shared_act},
                **{role: groups[role] for role in ("offsets", "order", "blocks") if role in groups},
                "gate": self.bind.weight(moe.gate_proj),
                "up": self.bind.weight(moe.up_proj),
                "shared_gate": self.bind.weight(moe.shared_gate_proj),
                "shared_up": self.bind.weight(moe.shared_up_proj),
            },
        )
        choice = self.recorder.choose(experts_in)
        if groups:
            tile = choice.options.get("tile_rows", TILE_ROWS)
            assert isinstance(tile, int)
            self._op("moe.group", f"layers.{i}.mlp.group", shape, {"ids": self.ids, **groups}, {"tile_rows": tile})
        self.recorder.emit(experts_in, choice)
        self._op(
            "moe.experts_out",
            f"layers.{i}.mlp.experts_out",
            shape,
            {
                **{"act": self.act, "shared_act": self.shared_act, "ids": self.ids, "x": self.x},
                **{role: groups[role] for role in ("offsets", "inverse", "blocks") if role in groups},
                "weights": self.route_weights,
                "down": self.bind.weight(moe.down_proj),
                "shared_down": self.bind.weight(moe.shared_down_proj),
            },
        )

    def _groups(self) -> dict[str, Operand]:
        experts, routes = self.config.num_experts, self.routes
        blocks = min(routes, experts + routes // MIN_TILE_ROWS)
        return {
            "offsets": self.recorder.layer_tensor(experts + 1, dtype="i32"),
            "order": self.recorder.layer_tensor(routes, dtype="i32"),
            "inverse": self.recorder.layer_tensor(routes, dtype="i32"),
            "blocks": self.recorder.layer_tensor(blocks + 1, 3, dtype="i32"),
        }

    def _outputs(self) -> None:
        c = self.config
        rows = self.shape.rows if self.shape.outputs == "all" else 1
        head = self.bind.weight(self.weights.lm_head)
        width = self.x.view.nbytes // self.shape.rows
        x = Tensor(
            self.x.view.part(self.x.view.nbytes - rows * width, rows * width), (rows, c.hidden_size), self.x.dtype
        )
        logits = Tensor(View(self.slots.logits, 0, rows * c.vocab_size * 4), (rows, c.vocab_size), "f32")
        self._op(
            "logits",
            "lm_head",
            {"rows": rows, "hidden": c.hidden_size, "vocab": c.vocab_size, "bits": head.bits},
            {"x": x, "norm": self.bind.vector(self.weights.norm), "head": head, "logits": logits},
            {"eps": c.rms_norm_eps},
        )
        if self.shape.outputs != "sample":
            return
        vocab = c.vocab_size
        self._op(
            "sample",
            "sample",
            {"vocab": vocab},
            {
                "logits": Tensor(logits.view, (vocab,), "f32"),
                "mask": Tensor(View(self.slots.mask, 0, vocab), (vocab,), "u8"),
                "counts": Tensor(View(self.slots.counts, 0, 8 * vocab), (2, vocab), "i32"),
                "step": self.step,
            },
            {"advance": self.shape.rows},
        )

    def _linear(
        self,
        label: str,
        x: Tensor,
        parts: list[tuple[Matrix, Tensor]],
        *,
        norm: Vector | None = None,
        residual: bool = False,
    ) -> None:
        operands: dict[str, Operand] = {"x": x}
        if norm is not None:
            operands["norm"] = self.bind.vector(norm)
        weights = [self.bind.weight(matrix) for matrix, _ in parts]
        for n, (weight, (_, y)) in enumerate(zip(weights, parts, strict=True)):
            operands[f"w{n}"], operands[f"y{n}"] = weight, y
        shape = {
            "in_features": weights[0].cols,
            "out_features": sum(weight.rows for weight in weights),
            "bits": min(weight.bits for weight in weights),
            "parts": len(parts),
        }
        self._op("linear", label, shape, operands, {"eps": self.config.rms_norm_eps, "residual": int(residual)})

    def _op(
        self,
        name: str,
        label: str,
        shape: dict[str, int],
        operands: dict[str, Operand],
        params: dict[str, float] | None = None,
    ) -> None:
        self.recorder.emit(self._make(name, label, shape, operands, params))

    def _make(
        self,
        name: str,
        label: str,
        shape: dict[str, int],
        operands: dict[str, Operand],
        params: dict[str, float] | None = None,
    ) -> Op:
        return Op(name, self.shape.phase, label, {"rows": self.shape.rows, **shape}, operands, params or {})


TILE_ROWS = 32  # of moe.group's block map where the experts' variant has no tile
MIN_TILE_ROWS = 16  # bounds the block map
