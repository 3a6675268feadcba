"""Affine quantization against what ``mx.quantize`` computed, and against the dequantization of the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import lily.quantize
from lily.errors import CheckpointError, UsageError
from lily.quantize import BITS, GROUP_SIZES, Quantized, blocks, float32_to_bf16, quantize, to_float32
from lily.reference.bfloat16 import bfloat16_bits
from lily.reference.dense import dequantize

# Written by tools/make_quantize_fixture.py.
FIXTURE = Path(__file__).parent / "fixtures" / "quantize.npz"
DTYPES = ("float32", "bfloat16", "float16")


def raw(array: np.ndarray[Any, Any]) -> bytes:
    """Bits, so that -0 and 0 differ."""
    return np.ascontiguousarray(array).tobytes()


def same(one: Quantized, other: Quantized) -> bool:
    return all(a.shape == b.shape and raw(a) == raw(b) for a, b in zip(one, other, strict=True))


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_for_bit_what_mlx_computes(dtype: str, bits: int, group_size: int) -> None:
    with np.load(FIXTURE) as fixture:
        expected = [fixture[f"{dtype}_{bits}_{group_size}_{part}"] for part in ("words", "scales", "biases")]
        result = quantize(fixture[dtype], bits, group_size)
    assert [array.dtype for array in result] == [array.dtype for array in expected]
    assert same(result, Quantized(*expected))


@settings(deadline=None, max_examples=60)
@given(
    weights=hnp.arrays(np.float32, (3, 128), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(GROUP_SIZES),
)
def test_no_weight_moves_by_more_than_a_step(weights: np.ndarray[Any, Any], bits: int, group_size: int) -> None:
    words, scales, biases = quantize(weights, bits, group_size)
    restored = dequantize(words, scales, biases, bits, group_size)
    step = np.repeat(np.abs(scales.astype(np.float64)), group_size, axis=1)
    # Moving the scale so that the far edge has a code of its own can cost the near edge up to one step; rounding
    # scale * code in float32 adds a few units in the last place of the largest weight.
    slack = 1e-6 * np.abs(weights).max() + 1e-6
    assert (np.abs(restored - weights) <= 1.01 * step + slack).all()


@pytest.mark.parametrize("bits", BITS)
def test_weights_on_a_grid_come_back_as_they_were(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, (5, 256))
    codes[:, ::32], codes[:, 1::32] = 0, 2**bits - 1  # every group uses its whole range
    weights = ((codes - 2 ** (bits - 1)) / 64).astype(np.float32)
    for sign in (1, -1):
        words, scales, biases = quantize(sign * weights, bits, 32)
        assert np.array_equal(dequantize(words, scales, biases, bits, 32), sign * weights)


def test_neither_blocks_nor_strides_nor_stacking_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = float32_to_bf16(normal(4, 12, 64))
    whole = quantize(fused, 4, 32)
    monkeypatch.setattr(lily.quantize, "BLOCK_WEIGHTS", 100)
    assert same(quantize(fused, 4, 32), whole)
    upper = quantize(fused[:, 5:], 4, 32)  # a slice of every expert, as gate and up projections are
    assert same(upper, Quantized(*(part[:, 5:] for part in whole)))
    for i, expert in enumerate(fused):
        assert same(quantize(expert, 4, 32), Quantized(*(part[i] for part in whole)))
    unaligned = np.frombuffer(b"\0" + fused.tobytes(), np.uint8)[1:].view(np.uint16).reshape(fused.shape)
    assert same(quantize(unaligned, 4, 32), whole)


def test_the_weights_are_left_alone() -> None:
    weights = normal(4, 64)
    before = weights.copy()
    quantize(weights, 4, 64)
    assert np.array_equal(weights, before)


def test_blocks_cover_the_first_axis_once() -> None:
    array = np.empty((1000, 3, 100_000), np.bool_)
    parts = list(blocks(array))
    assert len(parts) > 1
    assert [i for part in parts for i in range(*part.indices(1000))] == list(range(1000))
    assert list(blocks(np.empty((0, 64)))) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_refused_by_name(value: float, dtype: str) -> None:
    weights = normal(70, 128)
    weights[69, 100] = value
    stored = weights.view(np.uint32) >> 16 if dtype == "bfloat16" else weights.astype(dtype)
    stored = stored.astype(np.uint16) if dtype == "bfloat16" else stored
    with pytest.raises(CheckpointError, match=r"tensor 'w' holds NaN or infinity"):
        quantize(stored, 4, 64, name="tensor 'w'")


@pytest.mark.parametrize(
    "extreme",
    [
        [3e38, -3e38],  # the range is beyond float32
        [3e38, 3e38],  # no scale is as small as this needs
    ],
)
def test_a_range_beyond_float32_is_refused(extreme: list[float]) -> None:
    weights = np.full((1, 32), extreme[0], np.float32)
    weights[0, 1] = extreme[1]
    with pytest.raises(CheckpointError, match=r"tensor 'w' holds weights of up to 3e\+38; that is too large"):
        quantize(weights, 8, 32, name="tensor 'w'")


@pytest.mark.parametrize(
    ("weights", "bits", "group_size", "message"),
    [
        (normal(2, 64), 3, 64, "to 3 bits in groups of 64; bits are 4 or 8"),
        (normal(2, 64), 4, 16, "to 4 bits in groups of 16; bits are 4 or 8, groups of 32, 64 or 128"),
        (normal(2, 96), 4, 64, r"of shape \[2, 96\] in groups of 64"),
        (normal(64), 4, 64, r"of shape \[64\]"),
        (normal(2, 64).astype(np.float64), 4, 64, "of float64; expected float32, float16 or bfloat16"),
    ],
)
def test_what_cannot_be_quantized_is_refused(
    weights: np.ndarray[Any, Any], bits: int, group_size: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        quantize(weights, bits, group_size)


@given(hnp.arrays(np.float32, 16, elements=st.floats(width=32, allow_nan=False)))
def test_rounding_to_bfloat16_is_to_nearest_ties_to_even(values: np.ndarray[Any, Any]) -> None:
    assert np.array_equal(float32_to_bf16(values), bfloat16_bits(values))


def test_widening_is_exact() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    finite = bits[(bits & 0x7F80) != 0x7F80]
    assert np.array_equal(float32_to_bf16(to_float32(finite)), finite)
    half = bits.view(np.float16)
    assert np.array_equal(to_float32(half).astype(np.float16), half, equal_nan=True)
