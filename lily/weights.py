"""What the engine binds: every weight of a model as a region of a source.

A *source* is one long buffer of bytes, a mapped shard or memory of Lily's own; kernels get a source and byte
offsets into it. Matrices stay where the file has them, packed. Copied are only the small float32 vectors (norms,
convolution taps, gates), scales that are not bfloat16, and experts that a file holds as one tensor each: those
have to be stacked before one kernel can index them, and are the only large tensors ever copied.

Shapes: model_spec §1; names and layouts: §2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Protocol

from lily.checkpoint import Checkpoint
from lily.config import ModelConfig
from lily.errors import ConfigError
from lily.matrix import Matrix, Region, Vector
from lily.tensors import ALIGNMENT, CheckpointTensors, Source

__all__ = [
    "FullAttentionWeights",
    "LayerWeights",
    "LinearAttentionWeights",
    "Matrix",
    "ModelWeights",
    "MoeWeights",
    "Region",
    "Source",
    "Vector",
    "abstract_weights",
    "load_weights",
]


@dataclass(frozen=True)
class LinearAttentionWeights:
    """A Gated DeltaNet mixer (model_spec §6).

    ``in_proj_qkv`` gives queries, keys, values in this order; ``conv1d`` is ``[conv_dim, taps]``, the last tap
    for the current token; ``norm`` is shared by the heads.
    """

    in_proj_qkv: Matrix
    in_proj_z: Matrix
    in_proj_b: Matrix
    in_proj_a: Matrix
    conv1d: Vector
    A_log: Vector
    dt_bias: Vector
    norm: Vector
    out_proj: Matrix


@dataclass(frozen=True)
class FullAttentionWeights:
    """A gated attention mixer (model_spec §5); ``q_proj`` has, for each head, its query then its gate rows."""

    q_proj: Matrix
    k_proj: Matrix
    v_proj: Matrix
    o_proj: Matrix
    q_norm: Vector
    k_norm: Vector


@dataclass(frozen=True)
class MoeWeights:
    """A mixture of experts (model_spec §7).

    ``gate`` is the router, ``gate_proj``, ``up_proj`` and ``down_proj`` hold all routed experts,
    ``shared_expert_gate`` has one row.
    """

    gate: Matrix
    gate_proj: Matrix
    up_proj: Matrix
    down_proj: Matrix
    shared_gate_proj: Matrix
    shared_up_proj: Matrix
    shared_down_proj: Matrix
    shared_expert_gate: Matrix


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer (model_spec §4)."""

    input_layernorm: Vector
    post_attention_layernorm: Vector
    mixer: LinearAttentionWeights | FullAttentionWeights
    moe: MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a model.

    Attributes:
        sources: uint8 ``[bytes]`` each, page-aligned, read-only: the checkpoint's shards, then one of Lily's
            own. Empty for abstract weights, whose regions all lie in one virtual source.
        embed_tokens: ``[vocab_size, hidden_size]``.
        lm_head: the same shape; the same object as ``embed_tokens`` if the two are tied.
        norm: of the final hidden state.
    """

    config: ModelConfig
    sources: list[Source]
    embed_tokens: Matrix
    lm_head: Matrix
    norm: Vector
    layers: tuple[LayerWeights, ...]

    def matrices(self) -> Iterator[Matrix]:
        """Every matrix once; a tied ``lm_head`` is not repeated."""
        return (part for part in self._parts() if isinstance(part, Matrix))

    def vectors(self) -> Iterator[Vector]:
        """Every vector once."""
        return (part for part in self._parts() if isinstance(part, Vector))

    def _parts(self) -> Iterator[Matrix | Vector]:
        yield self.embed_tokens
        for layer in self.layers:
            yield layer.input_layernorm
            yield from (getattr(layer.mixer, part.name) for part in fields(layer.mixer))
            yield layer.post_attention_layernorm
            yield from (getattr(layer.moe, part.name) for part in fields(layer.moe))
        yield self.norm
        if self.lm_head is not self.embed_tokens:
            yield self.lm_head

    @property
    def num_parameters(self) -> int:
        """Parameters of the text model."""
        return sum(part.size for part in self._parts())

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as bound: matrices as they are, vectors in float32."""
        return sum(matrix.nbytes for matrix in self.matrices()) + 4 * sum(v.size for v in self.vectors())

    @property
    def stored_nbytes(self) -> int:
        """Bytes that a checkpoint spends on these weights; the figures of model_spec §10 are of this kind."""
        return sum(m.nbytes for m in self.matrices()) + sum(v.stored_nbytes for v in self.vectors())

    def bytes_of(self, region: Region) -> Source:
        """A region's bytes, uint8 ``[nbytes]``, a view."""
        return self.sources[region.source][region.offset : region.offset + region.nbytes]


def load_weights(checkpoint: Checkpoint, config: ModelConfig) -> ModelWeights:
    """Bind a checkpoint's tensors; what is mapped stays mapped, except as the module's first lines say.

    Either layout, any prefix, quantized or not, experts stacked, fused or one tensor each.

    Raises:
        CheckpointError: a tensor is missing, has a wrong shape or dtype, is not part of the model that
            ``config`` describes, or the file mixes layouts; the message names file, tensor, what was found
            and what was expected.
    """
    tensors = CheckpointTensors(checkpoint, config)
    weights = _assemble(config, tensors)
    return replace(weights, sources=tensors.finish())


def abstract_weights(config: ModelConfig) -> ModelWeights:
    """The weights an MLX conversion of ``config`` would have, with regions but without bytes, for planning.

    Raises:
        ConfigError: a matrix's rows can't be split into the groups that ``config`` asks for.
    """
    return _assemble(config, _PlannedTensors(config))


class _Tensors(Protocol):
    """Where the parts come from: a checkpoint, or thin air."""

    def matrix(self, path: str, rows: int, cols: int) -> Matrix: ...

    def experts(self, path: str) -> tuple[Matrix, Matrix, Matrix]: ...

    def vector(self, path: str, shape: tuple[int, ...]) -> Vector: ...

    def norm(self, path: str, size: int) -> Vector: ...


def _assemble(config: ModelConfig, tensors: _Tensors) -> ModelWeights:
    embed_tokens = tensors.matrix("embed_tokens", config.vocab_size, config.hidden_size)
    layers = tuple(_layer(config, tensors, i) for i in range(config.num_hidden_layers))
    norm = tensors.norm("norm.weight", config.hidden_size)
    lm_head = embed_tokens
    if not config.tie_word_embeddings:
        lm_head = tensors.matrix("lm_head", config.vocab_size, config.hidden_size)
    return ModelWeights(config, [], embed_tokens, lm_head, norm, layers)


def _layer(config: ModelConfig, tensors: _Tensors, index: int) -> LayerWeights:
    path = f"layers.{index}"
    linear = config.layer_types[index] == "linear_attention"
    return LayerWeights(
        input_layernorm=tensors.norm(f"{path}.input_layernorm.weight", config.hidden_size),
        post_attention_layernorm=tensors.norm(f"{path}.post_attention_layernorm.weight", config.hidden_size),
        mixer=(_linear_attention if linear else _full_attention)(config, tensors, path),
        moe=_moe(config, tensors, f"{path}.mlp"),
    )


def _linear_attention(config: ModelConfig, tensors: _Tensors, layer: str) -> LinearAttentionWeights:
    path, hidden, heads = f"{layer}.linear_attn", config.hidden_size, config.linear_num_value_heads
    return LinearAttentionWeights(
        in_proj_qkv=tensors.matrix(f"{path}.in_proj_qkv", config.conv_dim, hidden),
        in_proj_z=tensors.matrix(f"{path}.in_proj_z", config.value_dim, hidden),
        in_proj_b=tensors.matrix(f"{path}.in_proj_b", heads, hidden),
        in_proj_a=tensors.matrix(f"{path}.in_proj_a", heads, hidden),
        conv1d=tensors.vector(f"{path}.conv1d.weight", (config.conv_dim, config.linear_conv_kernel_dim)),
        A_log=tensors.vector(f"{path}.A_log", (heads,)),
        dt_bias=tensors.vector(f"{path}.dt_bias", (heads,)),
        norm=tensors.vector(f"{path}.norm.weight", (config.linear_value_head_dim,)),
        out_proj=tensors.matrix(f"{path}.out_proj", hidden, config.value_dim),
    )


def _full_attention(config: ModelConfig, tensors: _Tensors, layer: str) -> FullAttentionWeights:
    path, hidden = f"{layer}.self_attn", config.hidden_size
    return FullAttentionWeights(
        q_proj=tensors.matrix(f"{path}.q_proj", 2 * config.query_dim, hidden),
        k_proj=tensors.matrix(f"{path}.k_proj", config.kv_dim, hidden),
        v_proj=tensors.matrix(f"{path}.v_proj", config.kv_dim, hidden),
        o_proj=tensors.matrix(f"{path}.o_proj", hidden, config.query_dim),
        q_norm=tensors.norm(f"{path}.q_norm.weight", config.head_dim),
        k_norm=tensors.norm(f"{path}.k_norm.weight", config.head_dim),
    )


def _moe(config: ModelConfig, tensors: _Tensors, path: str) -> MoeWeights:
    hidden, shared = config.hidden_size, config.shared_expert_intermediate_size
    gate_proj, up_proj, down_proj = tensors.experts(path)
    return MoeWeights(
        gate=tensors.matrix(f"{path}.gate", config.num_experts, hidden),
        gate_proj=gate_proj,
        up_proj=up_proj,
        down_proj=down_proj,
        shared_gate_proj=tensors.matrix(f"{path}.shared_expert.gate_proj", shared, hidden),
        shared_up_proj=tensors.matrix(f"{path}.shared_expert.up_proj", shared, hidden),
        shared_down_proj=tensors.matrix(f"{path}.shared_expert.down_proj", hidden, shared),
        shared_expert_gate=tensors.matrix(f"{path}.shared_expert_gate", 1, hidden),
    )


class _PlannedTensors:
    """Parts in the MLX layout, laid out one after the other in one virtual source."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.end = 0

    def region(self, nbytes: int) -> Region:
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end = offset + nbytes
        return Region(0, offset, nbytes)

    def matrix(self, path: str, rows: int, cols: int, experts: int = 0) -> Matrix:
        config = self.config
        setting = config.quantization.of(path) if config.quantization else None
        size = rows * cols
        stack = max(experts, 1)
        if setting is None:
            weight = self.region(stack * size * 2)
            stride = size * 2 if experts else 0
            return Matrix(path, rows, cols, experts, "bf16", 0, weight, None, None, stride, 0)
        bits, group_size = setting
        if cols % group_size:
            raise ConfigError(
                f"{config.source}: {path} has rows of {cols} weights; they can't be quantized in groups of {group_size}"
            )
        weight_stride, scale_stride = size * bits // 8, size // group_size * 2
        weight, scales, biases = (self.region(stack * nbytes) for nbytes in (weight_stride, scale_stride, scale_stride))
        if not experts:
            weight_stride = scale_stride = 0
        return Matrix(
            path,
            rows,
            cols,
            experts,
            f"q{bits}",
            group_size,
            weight,
            scales,
            biases,
            weight_stride,
            scale_stride,
        )

    def experts(self, path: str) -> tuple[Matrix, Matrix, Matrix]:
        config = self.config
        hidden, inner, experts = (
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
        )
        return (
            self.matrix(f"{path}.switch_mlp.gate_proj", inner, hidden, experts),
            self.matrix(f"{path}.switch_mlp.up_proj", inner, hidden, experts),
            self.matrix(f"{path}.switch_mlp.down_proj", hidden, inner, experts),
        )

    def vector(self, path: str, shape: tuple[int, ...]) -> Vector:
        size = shape[0] if len(shape) == 1 else shape[0] * shape[1]
        # MLX conversions keep A_log as the release has it, in float32 (model_spec §2).
        return Vector(path, size, self.region(4 * size), size * (4 if path.endswith("A_log") else 2))

    def norm(self, path: str, size: int) -> Vector:
        return self.vector(path, (size,))
