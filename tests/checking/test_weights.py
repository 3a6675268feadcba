"""Random weights: every format's values and layout, and the bounds that errors are counted in."""

from __future__ import annotations

import numpy as np
import pytest

from lily.checking.memory import Memory
from lily.checking.tables import FORMATS
from lily.checking.weights import BF16, Q4, WeightFormat, project, random_pair, random_weight, row_values

ROWS, COLS, EXPERTS = 12, 256, 3


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("skew", [0, 5])
def test_a_matrix_keeps_the_magnitude_of_its_input(fmt: WeightFormat, skew: int) -> None:
    rng = np.random.default_rng(1)
    memory = Memory(skew=skew)
    weight = random_weight(memory, rng, 200, COLS, fmt)
    assert weight.weight.offset % 8 == skew
    assert weight.weight.nbytes == 200 * COLS * fmt.bits // 8
    x = rng.standard_normal((4, COLS))
    y, magnitude = project(memory, x, weight)
    assert 0.7 < y.std() < 1.4
    assert (magnitude >= np.abs(y)).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_rows_are_those_of_the_matrix(fmt: WeightFormat) -> None:
    memory = Memory(skew=3)
    weight = random_weight(memory, np.random.default_rng(2), ROWS, COLS, fmt)
    columns, magnitudes = project(memory, np.eye(COLS), weight)
    chosen = np.array([11, 0, 0, 5])
    values, units = row_values(memory, weight, chosen)
    assert np.array_equal(values, columns.T[chosen])
    assert np.allclose(units, magnitudes.T[chosen], rtol=1e-6)


def test_quantized_values_follow_the_specification() -> None:
    """model_spec §3, code by code."""
    memory = Memory()
    weight = random_weight(memory, np.random.default_rng(3), 2, 64, Q4)
    words = memory.bytes_of(weight.weight).view("<u4")
    scales, biases = (
        (memory.bytes_of(view).view("<u2").astype(np.uint32) << 16).view(np.float32).astype(float)
        for view in (weight.scales, weight.biases)
    )
    values = project(memory, np.eye(64), weight)[0].T
    for row in range(2):
        for column in range(64):
            code = int(words[row * 8 + column // 8]) >> 4 * (column % 8) & 15
            assert values[row, column] == scales[row] * code + biases[row]


@pytest.mark.parametrize("fmt", [Q4, BF16], ids=str)
def test_experts_differ_and_lie_a_stride_apart(fmt: WeightFormat) -> None:
    memory = Memory()
    gate, up = random_pair(memory, np.random.default_rng(4), ROWS, COLS, fmt, experts=EXPERTS)
    dense = [project(memory, np.eye(COLS), weight, e)[0] for weight in (gate, up) for e in range(EXPERTS)]
    assert all(not np.array_equal(one, two) for i, one in enumerate(dense) for two in dense[:i])
    last = (EXPERTS - 1) * gate.weight_stride + ROWS * COLS * fmt.bits // 8
    assert last == gate.weight.nbytes
    if fmt is BF16:  # fused: each expert's gate, then its up
        assert gate.weight_stride == 2 * ROWS * COLS * 2
        assert up.weight.offset == gate.weight.offset + ROWS * COLS * 2


def test_a_large_stack_repeats_with_a_period_that_no_row_has() -> None:
    memory = Memory()
    weight = random_weight(memory, np.random.default_rng(5), 1024, 2048, Q4, experts=4)
    rows = memory.bytes_of(weight.weight).reshape(-1, 1024)
    assert len(np.unique(rows[::256], axis=0)) == len(rows[::256])
