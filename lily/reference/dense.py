"""Oracles of the dense ops: affine dequantization, embedding, norm, linear and logits.

``float64`` throughout; shapes use T for tokens. Weights may be given as bfloat16 bit patterns
(``uint16``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lily.reference.bfloat16 import as_float64

__all__ = [
    "dequantize",
    "embed",
    "linear",
    "logits",
    "rms_norm",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
]

Array = NDArray[np.float64]


def sigmoid(x: ArrayLike) -> Array:
    """1 / (1 + e^-x), without overflow at either end."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -as_float64(x))))


def silu(x: ArrayLike) -> Array:
    """x · sigmoid(x)."""
    return as_float64(x) * sigmoid(x)


def softplus(x: ArrayLike) -> Array:
    """ln(1 + e^x), without overflow."""
    return np.asarray(np.logaddexp(0.0, as_float64(x)))


def softmax(x: ArrayLike) -> Array:
    """Softmax over the last axis; -inf entries get probability 0 as long as one entry is finite."""
    values = as_float64(x)
    exponentials = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def dequantize(weight: NDArray[np.uint32], scales: ArrayLike, biases: ArrayLike, bits: int, group_size: int) -> Array:
    """Expand an affine-quantized matrix (model specification §3).

    Args:
        weight: ``uint32`` [..., columns · bits / 32]; code j lies in word j · bits / 32, low bits
            first.
        scales: [..., columns / group_size], bfloat16 bits or any float type; may be negative.
        biases: like ``scales``.
        bits: 2, 4 or 8.
        group_size: consecutive columns that share one scale and bias.

    Returns:
        scale · code + bias as float64 [..., columns]. The product is exact in float32 too; a
        float32 evaluation differs only by the one rounding of the sum.

    Raises:
        ValueError: ``bits`` is none of the above, or the shapes of the three arrays disagree.
    """
    if bits not in (2, 4, 8):
        raise ValueError(f"bits is {bits}; codes of 2, 4 or 8 bits fill whole words")
    words = np.asarray(weight, dtype=np.uint32)
    scale, bias = as_float64(scales), as_float64(biases)
    columns = words.shape[-1] * 32 // bits
    groups = (*words.shape[:-1], columns // group_size)
    if columns % group_size or scale.shape != groups or bias.shape != groups:
        raise ValueError(
            f"scales {scale.shape} and biases {bias.shape} should both be {groups} "
            f"for words {words.shape}, {bits} bits and groups of {group_size}"
        )
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
    values = codes.reshape(*groups, group_size) * scale[..., None] + bias[..., None]
    return np.asarray(values).reshape(*words.shape[:-1], columns)


def embed(table: ArrayLike, tokens: ArrayLike) -> Array:
    """Rows of ``table`` [V, H] for ``tokens`` [T] -> [T, H]; no scale (§4)."""
    return as_float64(np.asarray(table)[np.asarray(tokens, dtype=np.int64)])


def rms_norm(x: ArrayLike, weight: ArrayLike, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) · weight over the last axis; ``weight`` includes the 1 + w (§4)."""
    values = as_float64(x)
    mean_square = np.mean(np.square(values), axis=-1, keepdims=True)
    return np.asarray(values / np.sqrt(mean_square + eps) * as_float64(weight))


def linear(x: ArrayLike, weight: ArrayLike) -> Array:
    """x [T, K] times the transpose of ``weight`` [N, K] -> [T, N]; no bias."""
    return np.asarray(as_float64(x) @ as_float64(weight).T)


def logits(x: ArrayLike, norm: ArrayLike, head: ArrayLike, eps: float) -> Array:
    """Final norm and output projection (§4): x [T, H], norm [H], head [V, H] -> [T, V]."""
    return linear(rms_norm(x, norm, eps), head)
