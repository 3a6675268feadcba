"""Names, shapes and dtypes of a checkpoint in MLX's and in Hugging Face's layout (model_spec §1, §2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lily.checkpoint import Checkpoint
from lily.config import ModelConfig
from lily.errors import CheckpointError
from lily.matrix import Matrix, Vector
from lily.shard_writer import TensorSpec
from lily.tensors import CheckpointTensors
from lily.weights import abstract_weights

__all__ = [
    "DROPPED_KEYS",
    "QUANTIZATION_KEYS",
    "bind",
    "huggingface_parts",
    "huggingface_tensors",
    "is_norm",
    "mlx_parts",
    "mlx_tensors",
    "quantization_section",
    "with_quantization",
]

# Of config.json. Readers look for one or the other (model_spec §2).
QUANTIZATION_KEYS = ("quantization", "quantization_config")
# Where a model came from, and a part of it that a checkpoint of the text model doesn't have.
DROPPED_KEYS = ("_name_or_path", "vision_config")

# The router and the gate of the shared expert decide more than their size says: MLX keeps them at 8 bits, and in
# groups of 64 whatever the others are in.
GATES = (".mlp.gate", ".mlp.shared_expert_gate")
GATE_GROUP_SIZE = 64

KEPT_FLOAT32 = (".A_log",)
# The release keeps these two in float32 (model_spec §2).
HUGGINGFACE_FLOAT32 = (".A_log", ".linear_attn.norm.weight")


def mlx_parts(config: ModelConfig) -> list[Matrix | Vector]:
    """Every matrix and vector of the model under its canonical MLX path, formats as ``config`` quantizes it.

    In the order of the layers. Regions mean nothing.

    Raises:
        ConfigError: as in :func:`lily.weights.abstract_weights`.
    """
    weights = abstract_weights(config)
    return sorted([*weights.matrices(), *weights.vectors()], key=_place)


def mlx_tensors(part: Matrix | Vector, config: ModelConfig, dtype: str) -> tuple[TensorSpec, ...]:
    """How an MLX conversion stores a part of :func:`mlx_parts`: one tensor, or words, scales and biases.

    Args:
        dtype: of all but words and ``A_log``: ``"BF16"``, ``"F16"`` or ``"F32"``.
    """
    prefix = "language_model." if part.name == "lm_head" else "language_model.model."
    name = prefix + part.name
    if isinstance(part, Vector):
        channels_last = (config.conv_dim, config.linear_conv_kernel_dim, 1)
        shape = channels_last if _is_convolution(part) else (part.size,)
        return (TensorSpec(name, "F32" if part.name.endswith(KEPT_FLOAT32) else dtype, shape),)
    lead = (part.experts,) if part.experts else ()
    if not part.group_size:
        return (TensorSpec(f"{name}.weight", dtype, (*lead, part.rows, part.cols)),)
    bits = 4 if part.format == "q4" else 8
    groups = (*lead, part.rows, part.cols // part.group_size)
    return (
        TensorSpec(f"{name}.weight", "U32", (*lead, part.rows, part.cols * bits // 32)),
        TensorSpec(f"{name}.scales", dtype, groups),
        TensorSpec(f"{name}.biases", dtype, groups),
    )


def huggingface_parts(config: ModelConfig) -> list[Matrix | Vector]:
    """Every matrix and vector of an unquantized model under its Hugging Face path, gate and up projections fused."""
    parts: list[Matrix | Vector] = []
    for part in mlx_parts(replace(config, quantization=None)):
        if part.name.endswith(".switch_mlp.gate_proj"):
            assert isinstance(part, Matrix)
            fused = part.name.replace("switch_mlp.gate_proj", "experts.gate_up_proj")
            parts.append(replace(part, name=fused, rows=2 * part.rows))
        elif part.name.endswith(".switch_mlp.down_proj"):
            parts.append(replace(part, name=part.name.replace("switch_mlp", "experts")))
        elif ".switch_mlp." not in part.name:
            parts.append(part)
    return parts


def huggingface_tensors(part: Matrix | Vector, config: ModelConfig) -> tuple[TensorSpec, ...]:
    """How the release stores a part of :func:`huggingface_parts`: one tensor, nearly always bfloat16."""
    name = part.name if part.name == "lm_head" else f"model.language_model.{part.name}"
    if isinstance(part, Vector):
        taps_last = (config.conv_dim, 1, config.linear_conv_kernel_dim)
        dtype = "F32" if part.name.endswith(HUGGINGFACE_FLOAT32) else "BF16"
        return (TensorSpec(name, dtype, taps_last if _is_convolution(part) else (part.size,)),)
    if part.experts:
        return (TensorSpec(name, "BF16", (part.experts, part.rows, part.cols)),)
    return (TensorSpec(f"{name}.weight", "BF16", (part.rows, part.cols)),)


def is_norm(part: Vector) -> bool:
    """Whether Hugging Face stores this vector zero-centred and MLX as 1+w (model_spec §2a)."""
    return part.name.endswith("norm.weight") and not part.name.endswith(".linear_attn.norm.weight")


def quantization_section(config: ModelConfig, bits: int, group_size: int, gate_bits: int) -> dict[str, Any]:
    """The ``quantization`` object of ``config.json`` that MLX-LM writes for a model that it quantizes.

    The router and the shared expert's gate have ``gate_bits``. A matrix whose rows can't be split into whole groups
    stays unquantized, and is said to be.
    """
    section: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": "affine"}
    for part in mlx_parts(replace(config, quantization=None)):
        if isinstance(part, Vector):
            continue
        gate = part.name.endswith(GATES)
        path = mlx_tensors(part, config, "BF16")[0].name.removesuffix(".weight")
        if part.cols % group_size or (gate and part.cols % GATE_GROUP_SIZE):
            section[path] = False
        elif gate:
            section[path] = {"group_size": GATE_GROUP_SIZE, "bits": gate_bits}
    return section


def with_quantization(config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with the section under both names."""
    return {**config, **{key: dict(section) for key in QUANTIZATION_KEYS}}


def bind(checkpoint: Checkpoint, config: ModelConfig) -> tuple[CheckpointTensors, dict[str, Matrix | Vector]]:
    """Hold every tensor of a checkpoint against the model that ``config`` describes, without reading any.

    Returns:
        The tensors, and the parts of :func:`mlx_parts` by name, with the checkpoint's own formats and regions.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or has the wrong shape or dtype.
    """
    tensors = CheckpointTensors(checkpoint, config)
    bound: dict[str, Matrix | Vector] = {}
    for part in mlx_parts(replace(config, quantization=None)):
        if isinstance(part, Vector):
            shape = (config.conv_dim, config.linear_conv_kernel_dim) if _is_convolution(part) else (part.size,)
            bound[part.name] = tensors.norm(part.name, part.size) if is_norm(part) else tensors.vector(part.name, shape)
        elif not part.experts:
            bound[part.name] = tensors.matrix(part.name, part.rows, part.cols)
        elif part.name.endswith(".gate_proj"):
            bound |= {matrix.name: matrix for matrix in tensors.experts(part.name.partition(".switch_mlp.")[0])}
    # A tied model may store its output matrix all the same.
    unused = [
        name
        for path, name in tensors.unused.items()
        if not (config.tie_word_embeddings and path.startswith("lm_head."))
    ]
    if unused:
        file = checkpoint.file_of(checkpoint.info(unused[0]))
        raise CheckpointError(
            f"{file}: tensor {unused[0]!r} is not part of the model that {config.source} describes "
            f"({len(unused)} such tensors)"
        )
    return tensors, bound


def _is_convolution(part: Vector) -> bool:
    return part.name.endswith(".conv1d.weight")


def _place(part: Matrix | Vector) -> tuple[int, str]:
    words = part.name.split(".")
    if words[0] == "layers":
        return int(words[1]), part.name
    return (-1 if words[0] == "embed_tokens" else 1 << 30), part.name
