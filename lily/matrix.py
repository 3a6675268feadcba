"""Where a weight lies and how it is packed: the operands that kernels read."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Matrix", "Region", "Vector"]

BITS = {"q4": 4, "q8": 8, "bf16": 16, "f16": 16, "f32": 32}


@dataclass(frozen=True)
class Region:
    """Bytes ``offset .. offset + nbytes`` of a source; offsets of file tensors have no alignment at all."""

    source: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Matrix:
    """A Linear's weight ``[rows, cols]``, or one for each expert ``[experts, rows, cols]``, row-major.

    Attributes:
        name: canonical module path, such as ``layers.0.mlp.gate``.
        rows: outputs.
        cols: inputs.
        experts: how many are stacked; 0 if there is just one matrix.
        format: ``"q4"`` or ``"q8"`` (affine codes, little-endian in uint32 words, model_spec §3), ``"bf16"``,
            ``"f16"`` or ``"f32"``.
        group_size: weights of a row that share a scale and a bias; 0 if not quantized.
        weight: from the first expert's first byte to the last one's last. Where a file fuses gate and up
            projections, most of the other matrix lies in between.
        scales, biases: ``[experts, rows, cols / group_size]`` each; None if not quantized.
        weight_stride: bytes from one expert's weight to the next one's; 0 if there is just one matrix.
        scale_stride: the same for scales and for biases.
        scale_dtype: of scales and biases, ``"bf16"`` or ``"f32"``; of no meaning if not quantized.
    """

    name: str
    rows: int
    cols: int
    experts: int
    format: str
    group_size: int
    weight: Region
    scales: Region | None
    biases: Region | None
    weight_stride: int
    scale_stride: int
    scale_dtype: str = "bf16"

    @property
    def size(self) -> int:
        """Parameters, of all experts."""
        return max(self.experts, 1) * self.rows * self.cols

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert, or of the matrix if there is just one: weight, scales and biases."""
        return self.nbytes // max(self.experts, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        nbytes = self.size * BITS[self.format] // 8
        if self.group_size:
            nbytes += 2 * (self.size // self.group_size) * (2 if self.scale_dtype == "bf16" else 4)
        return nbytes


@dataclass(frozen=True)
class Vector:
    """A small float32 tensor, ready to use: norms hold the multiplier itself, the 1 of 1+w already added.

    Attributes:
        name: canonical tensor path, such as ``layers.0.linear_attn.A_log``.
        size: elements.
        region: in the last source, 64-byte aligned.
        stored_nbytes: bytes that the checkpoint spends on it, in whatever dtype it has there.
    """

    name: str
    size: int
    region: Region
    stored_nbytes: int
