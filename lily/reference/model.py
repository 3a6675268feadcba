"""The whole model in float64, layer by layer from the op oracles (model specification §4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lily.errors import CheckpointError, ConfigError
from lily.reference.deltanet import deltanet_prepare, deltanet_recurrence, gated_norm
from lily.reference.dense import embed, linear, logits, rms_norm
from lily.reference.full_attention import attention, attention_prepare, gate_output
from lily.reference.moe import experts_in, experts_out, route, shared_expert_in, shared_expert_scale
from lily.reference.tensors import read_config, read_tensors

__all__ = ["AttentionState", "DeltaNetState", "ReferenceModel", "ReferenceState"]

Array = NDArray[np.float64]


@dataclass
class AttentionState:
    """Cached keys (normalised and rotated) and values of one layer, both [S, Nkv, D]."""

    keys: Array
    values: Array


@dataclass
class DeltaNetState:
    """Convolution rows [taps - 1, C] and recurrent state [Hv, dv, dk] of one layer."""

    convolution: Array
    recurrent: Array


@dataclass
class ReferenceState:
    """What a sequence leaves behind: the number of tokens seen, and one state for each layer."""

    position: int
    layers: list[AttentionState | DeltaNetState]


class ReferenceModel:
    """A model of the qwen3_5_moe text architecture.

    Args:
        config: the object in ``config.json``, with or without a nested ``text_config``.
        tensors: dense float64 tensors, named as by :func:`lily.reference.tensors.read_tensors`.

    Raises:
        ConfigError: a needed key is absent from ``config``.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        text = config.get("text_config", config)
        self.tensors = tensors
        try:
            rope: Mapping[str, Any] = text["rope_parameters"]
            self.layers = int(text["num_hidden_layers"])
            self.eps = float(text["rms_norm_eps"])
            self.query_heads = int(text["num_attention_heads"])
            self.kv_heads = int(text["num_key_value_heads"])
            self.head_dim = int(text["head_dim"])
            self.theta = float(rope["rope_theta"])
            self.rotary_dim = int(self.head_dim * rope["partial_rotary_factor"])
            self.key_heads = int(text["linear_num_key_heads"])
            self.value_heads = int(text["linear_num_value_heads"])
            self.key_dim = int(text["linear_key_head_dim"])
            self.value_dim = int(text["linear_value_head_dim"])
            self.top_k = int(text["num_experts_per_tok"])
        except KeyError as error:
            raise ConfigError(f"config.json lacks {error}, which the model needs") from error
        self.head = "embed_tokens" if text.get("tie_word_embeddings", False) else "lm_head"

    @classmethod
    def load(cls, directory: str | Path) -> ReferenceModel:
        """Read a checkpoint directory in MLX or Hugging Face layout, quantized or not.

        Raises:
            ConfigError, CheckpointError: the directory can't be read as such a checkpoint.
        """
        config = read_config(Path(directory))
        return cls(config, read_tensors(Path(directory), config))

    def new_state(self) -> ReferenceState:
        """The state before the first token."""
        return ReferenceState(0, [self._empty_layer_state(index) for index in range(self.layers)])

    def forward(self, tokens: ArrayLike, state: ReferenceState | None = None) -> Array:
        """Logits [T, V] after each of ``tokens`` [T]; ``state`` (or a fresh one) moves on by T."""
        x = np.empty((0, 0))
        for outcome in self.residual_stream(tokens, state):
            x = outcome
        return logits(x, self._tensor("norm"), self._tensor(self.head), self.eps)

    def residual_stream(self, tokens: ArrayLike, state: ReferenceState | None = None) -> Iterator[Array]:
        """The residual stream [T, H] after the embedding, then after each layer: L + 1 arrays.

        ``state`` has moved on by T tokens once all of them have been taken.
        """
        sequence = state if state is not None else self.new_state()
        x = embed(self._tensor("embed_tokens"), tokens)
        yield x
        for index in range(self.layers):
            x = self.layer(index, x, sequence.layers[index], sequence.position)
            yield x
        sequence.position += x.shape[0]

    def layer(self, index: int, x: Array, state: AttentionState | DeltaNetState, position: int) -> Array:
        """Residual stream x [T, H] -> [T, H]; x[0] is at ``position``, and ``state`` moves on."""
        h = rms_norm(x, self._of(index, "input_layernorm"), self.eps)
        if isinstance(state, AttentionState):
            x = x + self.attend(index, h, state, position)
        else:
            x = x + self.recur(index, h, state)
        h = rms_norm(x, self._of(index, "post_attention_layernorm"), self.eps)
        return self.mix_experts(index, h, x)

    def attend(self, index: int, h: Array, state: AttentionState, position: int) -> Array:
        """Gated full attention of normed h [T, H] -> [T, H] (§5)."""
        path, tokens = "self_attn.", h.shape[0]
        u, k, v = (linear(h, self._of(index, f"{path}{name}_proj")) for name in "qkv")
        u = u.reshape(tokens, self.query_heads, 2 * self.head_dim)
        k = k.reshape(tokens, self.kv_heads, self.head_dim)
        v = v.reshape(tokens, self.kv_heads, self.head_dim)
        q, gate, k = attention_prepare(
            u,
            k,
            self._of(index, path + "q_norm"),
            self._of(index, path + "k_norm"),
            np.arange(position, position + tokens),
            self.theta,
            self.rotary_dim,
            self.eps,
        )
        state.keys = np.concatenate([state.keys, k])
        state.values = np.concatenate([state.values, v])
        attended = attention(q, state.keys, state.values, position)
        return linear(gate_output(attended, gate), self._of(index, path + "o_proj"))

    def recur(self, index: int, h: Array, state: DeltaNetState) -> Array:
        """Gated DeltaNet of normed h [T, H] -> [T, H] (§6)."""
        path, tokens = "linear_attn.", h.shape[0]
        p, z, a, b = (linear(h, self._of(index, f"{path}in_proj_{name}")) for name in ("qkv", "z", "a", "b"))
        q, k, v, decay, beta, state.convolution = deltanet_prepare(
            p,
            a,
            b,
            state.convolution,
            self._of(index, path + "conv1d"),
            self._of(index, path + "A_log"),
            self._of(index, path + "dt_bias"),
            self.key_heads,
            self.value_heads,
            self.key_dim,
            self.value_dim,
        )
        o, state.recurrent = deltanet_recurrence(q, k, v, decay, beta, state.recurrent)
        y = gated_norm(o, z.reshape(o.shape), self._of(index, path + "norm"), self.eps)
        return linear(y.reshape(tokens, -1), self._of(index, path + "out_proj"))

    def mix_experts(self, index: int, h: Array, residual: Array) -> Array:
        """Mixture of experts of normed h [T, H] plus ``residual`` [T, H] -> [T, H] (§7)."""
        ids, weights = route(h, self._of(index, "mlp.gate"), self.top_k)
        gate, up, down = (self._of(index, f"mlp.switch_mlp.{name}_proj") for name in ("gate", "up", "down"))
        active = experts_in(h, ids, gate, up)
        gate, up, shared_down = (self._of(index, f"mlp.shared_expert.{name}_proj") for name in ("gate", "up", "down"))
        shared = shared_expert_in(h, gate, up)
        scale = shared_expert_scale(h, self._of(index, "mlp.shared_expert_gate"))
        return experts_out(active, ids, weights, down, shared, scale, shared_down, residual)

    def _empty_layer_state(self, index: int) -> AttentionState | DeltaNetState:
        if f"layers.{index}.self_attn.q_proj" in self.tensors:
            empty = np.zeros((0, self.kv_heads, self.head_dim))
            return AttentionState(empty, empty)
        channels, taps = self._of(index, "linear_attn.conv1d").shape
        recurrent = np.zeros((self.value_heads, self.value_dim, self.key_dim))
        return DeltaNetState(np.zeros((taps - 1, channels)), recurrent)

    def _of(self, index: int, name: str) -> Array:
        return self._tensor(f"layers.{index}.{name}")

    def _tensor(self, name: str) -> Array:
        if name not in self.tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        return self.tensors[name]
