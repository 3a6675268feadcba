"""The op oracles against hand-made values, brute force and a second derivation.

Everything is float64, so two ways to the same number agree to about 1e-13 relative; 1e-10 leaves room for sums.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lily import reference

CLOSE = {"rtol": 0.0, "atol": 1e-10}
Array = NDArray[np.float64]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def unit(x: Array) -> Array:
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


# bfloat16


def test_every_bfloat16_survives_a_round_trip() -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    values = reference.bfloat16_values(patterns)
    numbers = ~np.isnan(values)
    assert numbers.sum() == 2**16 - 2 * 127
    np.testing.assert_array_equal(reference.bfloat16_bits(values)[numbers], patterns[numbers])
    assert np.isnan(reference.round_bfloat16(values[~numbers])).all()


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1 + 2**-8, 1.0),  # a tie goes to the even mantissa, here down
        (1 + 3 * 2**-8, 1 + 2**-6),  # and here up
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (-3.14159, -3.140625),
        (3.4e38, math.inf),
        (0.0, 0.0),
    ],
)
def test_bfloat16_rounds_to_nearest_even(value: float, rounded: float) -> None:
    assert reference.round_bfloat16(value) == rounded


# dense


def test_dequantize_reads_low_bits_first() -> None:
    words = np.array([[0x76543210, 0xFEDCBA98]], dtype=np.uint32)
    scales, biases = reference.bfloat16_bits([[0.5, -2.0]]), reference.bfloat16_bits([[-1.0, 3.0]])
    expected = [*(0.5 * code - 1 for code in range(8)), *(-2.0 * code + 3 for code in range(8, 16))]
    np.testing.assert_array_equal(reference.dequantize(words, scales, biases, 4, 8), [expected])
    expected = [0.5 * code - 1 for code in (0x10, 0x32, 0x54, 0x76)] + [-2.0 * c + 3 for c in (0x98, 0xBA, 0xDC, 0xFE)]
    np.testing.assert_array_equal(reference.dequantize(words, scales, biases, 8, 4), [expected])


@given(st.sampled_from([2, 4, 8]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_dequantize_equals_the_formula_for_each_code(bits: int, rows: int, groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (2, rows, groups * 64 * bits // 32), dtype=np.uint32)
    scales, biases = rng.standard_normal((2, 2, rows, groups))
    dense = reference.dequantize(words, scales, biases, bits, 64)
    for expert, row, column in np.ndindex(dense.shape):
        word = int(words[expert, row, column * bits // 32])
        code = word >> (column % (32 // bits) * bits) & (2**bits - 1)
        place = expert, row, column // 64
        assert dense[expert, row, column] == scales[place] * code + biases[place]


@pytest.mark.parametrize(("bits", "groups"), [(3, 1), (4, 2), (8, 1)])
def test_dequantize_refuses_what_does_not_fit(bits: int, groups: int) -> None:
    words, scales = np.zeros((1, 8), dtype=np.uint32), np.zeros((1, groups))
    with pytest.raises(ValueError, match="bits"):
        reference.dequantize(words, scales, scales, bits, 64)


def test_activations_stay_finite_far_out() -> None:
    x = np.array([-1e4, -1.0, 0.0, 1.0, 1e4])
    sigmoid = np.array([0.0, 1 / (1 + math.e), 0.5, 1 / (1 + 1 / math.e), 1.0])
    np.testing.assert_allclose(reference.sigmoid(x), sigmoid, **CLOSE)
    np.testing.assert_allclose(reference.silu(x), x * sigmoid, **CLOSE)
    np.testing.assert_allclose(
        reference.softplus(x), [0, math.log(1 + 1 / math.e), math.log(2), math.log1p(math.e), 1e4]
    )
    np.testing.assert_allclose(reference.softmax([1e4, 1e4, -math.inf]), [0.5, 0.5, 0.0])


def test_norm_embedding_and_logits() -> None:
    np.testing.assert_allclose(reference.rms_norm([3.0, 4.0], [2.0, 1.0], 0.5), np.array([6.0, 4.0]) / math.sqrt(13))
    table, x, norm = normal(5, 4), normal(3, 4, seed=1), normal(4, seed=2)
    np.testing.assert_array_equal(reference.embed(table, [4, 0, 4]), table[[4, 0, 4]])
    expected = [
        [sum(a * b for a, b in zip(reference.rms_norm(row, norm, 1e-6), w, strict=True)) for w in table] for row in x
    ]
    np.testing.assert_allclose(reference.logits(x, norm, table, 1e-6), expected, **CLOSE)


# attention


def test_rope_turns_half_split_pairs_and_leaves_the_rest() -> None:
    x = normal(1, 1, 8)
    (turned,) = reference.rope(x, [3], 100.0, 4)[0]
    for m, frequency in enumerate((1.0, 0.1)):
        pair = complex(x[0, 0, m], x[0, 0, m + 2]) * np.exp(3j * frequency)
        np.testing.assert_allclose([turned[m], turned[m + 2]], [pair.real, pair.imag], **CLOSE)
    np.testing.assert_array_equal(turned[4:], x[0, 0, 4:])


def test_rope_makes_scores_depend_on_distance_alone() -> None:
    q, k = normal(1, 1, 64), normal(1, 1, 64, seed=1)
    near, far = (np.vdot(reference.rope(q, [at + 5], 1e7, 64), reference.rope(k, [at], 1e7, 64)) for at in (0, 200_000))
    # The angle of position 200,000 carries 2e5 · 2^-53 of rounding.
    assert near == pytest.approx(far, abs=1e-8)


def test_attention_prepare_splits_the_gate_by_head() -> None:
    u, k, q_norm, k_norm = normal(2, 3, 16), normal(2, 1, 8, seed=1), normal(8, seed=2), normal(8, seed=3)
    q, gate, key = reference.attention_prepare(u, k, q_norm, k_norm, [6, 7], 1e4, 4, 1e-6)
    np.testing.assert_array_equal(gate, u[:, :, 8:])
    expected = reference.rope(reference.rms_norm(u[:, :, :8], q_norm, 1e-6), [6, 7], 1e4, 4)
    np.testing.assert_allclose(q, expected, **CLOSE)
    np.testing.assert_allclose(key, reference.rope(reference.rms_norm(k, k_norm, 1e-6), [6, 7], 1e4, 4), **CLOSE)


def test_attention_equals_a_softmax_for_each_query() -> None:
    q, k, v = normal(5, 6, 8), normal(9, 2, 8, seed=1), normal(9, 2, 8, seed=2)
    out = reference.attention(q, k, v, 3)
    for t, head in np.ndindex(5, 6):
        visible = slice(0, 3 + t + 1)
        scores = [math.exp(q[t, head] @ key / math.sqrt(8)) for key in k[visible, head // 3]]
        expected = np.average(v[visible, head // 3], axis=0, weights=scores)
        np.testing.assert_allclose(out[t, head], expected, **CLOSE)


def test_attention_at_once_equals_step_by_step() -> None:
    q, k, v = normal(7, 4, 16), normal(7, 1, 16, seed=1), normal(7, 1, 16, seed=2)
    steps = [reference.attention(q[t : t + 1], k[: t + 1], v[: t + 1], t)[0] for t in range(7)]
    np.testing.assert_allclose(reference.attention(q, k, v, 0), steps, **CLOSE)
    with pytest.raises(ValueError, match="6 rows"):
        reference.attention(q, k[:6], v[:6], 0)


def test_the_output_gate_is_a_sigmoid_of_each_element() -> None:
    attended, gate = normal(2, 3, 4), normal(2, 3, 4, seed=1)
    expected = (attended / (1 + np.exp(-gate))).reshape(2, 12)
    np.testing.assert_allclose(reference.gate_output(attended, gate), expected, **CLOSE)


# deltanet

HEADS = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6}
CHANNELS = 2 * 2 * 8 + 4 * 6


def prepare(p: Array, conv_state: Array) -> tuple[Array, ...]:
    a, b = p[:, :4], p[:, 4:8]
    weights = normal(CHANNELS, 4, seed=1), normal(4, seed=2), normal(4, seed=3)
    return reference.deltanet_prepare(p, a, b, conv_state, *weights, *HEADS.values())


def scan_inputs(tokens: int, seed: int = 0) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)
    q, k = unit(rng.standard_normal((2, tokens, 2, 8)))
    return q, k, rng.standard_normal((tokens, 4, 6)), *rng.uniform(0, 1, (2, tokens, 4)), normal(4, 6, 8, seed=seed)


def test_deltanet_prepare_equals_the_formulas_one_by_one() -> None:
    p, conv_state = normal(5, CHANNELS), normal(3, CHANNELS, seed=4)
    q, k, v, decay, beta, after = prepare(p, conv_state)
    weight, a_log, dt_bias = normal(CHANNELS, 4, seed=1), normal(4, seed=2), normal(4, seed=3)
    rows = [*conv_state, *p]
    for t in range(5):
        total = np.array([sum(rows[t + j][c] * weight[c, j] for j in range(4)) for c in range(CHANNELS)])
        mixed = total / (1 + np.exp(-total))
        for head in range(2):
            q_row, k_row = mixed[8 * head :][:8], mixed[16 + 8 * head :][:8]
            np.testing.assert_allclose(q[t, head], q_row / math.sqrt(q_row @ q_row + 1e-6) / math.sqrt(8), **CLOSE)
            np.testing.assert_allclose(k[t, head], k_row / math.sqrt(k_row @ k_row + 1e-6), **CLOSE)
        np.testing.assert_allclose(v[t], mixed[32:].reshape(4, 6), **CLOSE)
        step = np.log1p(np.exp(p[t, :4] + dt_bias))
        np.testing.assert_allclose(decay[t], np.exp(-np.exp(a_log) * step), **CLOSE)
        np.testing.assert_allclose(beta[t], 1 / (1 + np.exp(-p[t, 4:8])), **CLOSE)
    np.testing.assert_array_equal(after, p[2:])


@pytest.mark.parametrize("first", [1, 2, 3, 6])
def test_deltanet_prepare_in_two_chunks_equals_one(first: int) -> None:
    p, start = normal(7, CHANNELS), np.zeros((3, CHANNELS))
    whole, head = prepare(p, start), prepare(p[:first], start)
    tail = prepare(p[first:], head[-1])
    for once, one, two in zip(whole[:-1], head[:-1], tail[:-1], strict=True):
        np.testing.assert_allclose(np.concatenate([one, two]), once, **CLOSE)
    np.testing.assert_array_equal(tail[-1], whole[-1])


def test_the_delta_rule_stores_and_recalls_a_value() -> None:
    """With no decay and beta 1, reading a unit key just written gives its value, whatever was there before."""
    _, k, v, _, _, state = scan_inputs(3)
    out, after = reference.deltanet_recurrence(k, k, v, np.ones((3, 4)), np.ones((3, 4)), state)
    np.testing.assert_allclose(out, v, **CLOSE)
    # Value heads 0 and 1 share key head 0, heads 2 and 3 share key head 1.
    np.testing.assert_allclose(np.einsum("nvk,nk->nv", after, k[-1][[0, 0, 1, 1]]), v[-1], **CLOSE)


def test_the_recurrence_decays_before_it_reads() -> None:
    _, k, v, _, _, state = scan_inputs(1)
    before = state.copy()
    out, after = reference.deltanet_recurrence(k, k, v, np.full((1, 4), 0.5), np.zeros((1, 4)), state)
    np.testing.assert_allclose(after, state / 2, **CLOSE)
    np.testing.assert_allclose(out[0], np.einsum("nvk,nk->nv", state / 2, k[0][[0, 0, 1, 1]]), **CLOSE)
    np.testing.assert_array_equal(state, before)


@pytest.mark.parametrize("block", [1, 2, 16, 37, 64])
def test_blockwise_equals_the_recurrence(block: int) -> None:
    *inputs, state = scan_inputs(37)
    inputs[3][20] = 0.0  # a decay that forgets everything, as one that underflowed
    for by_block, by_step in zip(
        reference.deltanet_blockwise(*inputs, state, block), reference.deltanet_recurrence(*inputs, state), strict=True
    ):
        np.testing.assert_allclose(by_block, by_step, **CLOSE)


def test_the_gated_norm_gates_after_the_norm() -> None:
    o, z, weight = normal(3, 4, 6), normal(3, 4, 6, seed=1), normal(6, seed=2)
    scale = np.sqrt(np.mean(o**2, axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(
        reference.gated_norm(o, z, weight, 1e-6), o / scale * weight * z / (1 + np.exp(-z)), **CLOSE
    )


# mixture of experts


def test_route_takes_the_lower_id_of_equals() -> None:
    h = np.array([[0.0, 1.0], [1.0, 0.0]])
    gate = np.array([[0.0, 2.0], [0.0, 3.0], [0.0, 2.0], [0.0, 2.0]])
    ids, weights = reference.route(h, gate, 3)
    np.testing.assert_array_equal(ids, [[1, 0, 2], [0, 1, 2]])
    np.testing.assert_allclose(weights[0], np.array([math.e, 1, 1]) / (math.e + 2))
    np.testing.assert_allclose(weights[1], [1 / 3] * 3)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 20), st.data())
@settings(max_examples=60, deadline=None)
def test_group_sorts_every_slot_into_its_experts_tiles(
    experts: int, tokens: int, tile_rows: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    ids = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)])
    grouping = reference.group(ids, experts, tile_rows)
    chosen = ids.reshape(-1)
    assert sorted(grouping.slots, key=lambda slot: (chosen[slot], slot)) == list(grouping.slots)
    np.testing.assert_array_equal(grouping.slots[grouping.rows], np.arange(tokens * top_k))
    np.testing.assert_array_equal(grouping.counts, [np.sum(chosen == expert) for expert in range(experts)])
    np.testing.assert_array_equal(grouping.offsets, [np.sum(chosen < expert) for expert in range(experts + 1)])
    covered = []
    for expert, first, rows in zip(grouping.block_expert, grouping.block_row, grouping.block_rows, strict=True):
        assert 1 <= rows <= tile_rows
        assert (first - grouping.offsets[expert]) % tile_rows == 0
        assert set(chosen[grouping.slots[first : first + rows]]) == {expert}
        covered.extend(range(first, first + rows))
    assert covered == list(range(tokens * top_k))


def test_experts_equal_a_loop_over_tokens() -> None:
    h, residual, ids = normal(6, 5), normal(6, 5, seed=9), np.array([[0, 2], [1, 3], [2, 0], [3, 1], [1, 0], [2, 1]])
    gate, up, down = normal(4, 3, 5, seed=1), normal(4, 3, 5, seed=2), normal(4, 5, 3, seed=3)
    shared = normal(7, 5, seed=4), normal(7, 5, seed=5), normal(5, 7, seed=6)
    weights, scale_gate = np.abs(normal(6, 2, seed=7)), normal(1, 5, seed=8)

    def expert(x: Array, gate: Array, up: Array, down: Array) -> Array:
        opened = gate @ x
        return np.asarray(down @ (opened / (1 + np.exp(-opened)) * (up @ x)))

    active = reference.experts_in(h, ids, gate, up)
    shared_active = reference.shared_expert_in(h, *shared[:2])
    scale = reference.shared_expert_scale(h, scale_gate)
    out = reference.experts_out(active, ids, weights, down, shared_active, scale, shared[2], residual)
    for t, x in enumerate(h):
        routed = [w * expert(x, gate[e], up[e], down[e]) for e, w in zip(ids[t], weights[t], strict=True)]
        always = expert(x, *shared) / (1 + math.exp(-float(scale_gate[0] @ x)))
        np.testing.assert_allclose(out[t], residual[t] + np.sum(routed, axis=0) + always, **CLOSE)


# sampling


def test_penalties_by_hand() -> None:
    penalised = reference.penalise(
        [2.0, -2.0, 2.0, 2.0, -math.inf], [3, 1, 0, 1, 0], [2, 0, 0, 1, 0], repetition=2.0, presence=0.25, frequency=0.5
    )
    np.testing.assert_array_equal(penalised, [1.0 - 0.25 - 1.0, -4.0, 2.0, 1.0 - 0.25 - 0.5, -math.inf])


def test_filters_by_hand() -> None:
    logits = np.log([0.1, 0.4, 0.2, 0.2, 0.1])
    sample = reference.sample_distribution
    np.testing.assert_allclose(sample(logits), [0.1, 0.4, 0.2, 0.2, 0.1])
    np.testing.assert_allclose(sample(logits, temperature=0.5), np.array([1, 16, 4, 4, 1]) / 26)
    np.testing.assert_allclose(sample(logits, top_k=2), [0, 2 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(sample(logits, top_k=4), np.array([1, 4, 2, 2, 0]) / 9)
    np.testing.assert_allclose(sample(logits, top_p=0.5), [0, 2 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(sample(logits, min_p=0.3), [0, 0.5, 0.25, 0.25, 0])
    # Top-p looks at what top-k left: 0.4 / 0.6 already reaches 0.6.
    np.testing.assert_allclose(sample(logits, top_k=2, top_p=0.6), [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(sample([1.0, 3.0, 3.0], temperature=0.0), [0, 1, 0])
    assert reference.greedy([1.0, 3.0, 3.0]) == 1


@given(
    st.lists(st.sampled_from([-math.inf, *np.linspace(-8, 8, 9)]), min_size=1, max_size=30),
    st.floats(0.05, 5),
    st.integers(0, 35),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
@settings(max_examples=200, deadline=None)
def test_a_sampling_distribution_is_the_right_prefix_of_the_ranking(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array([0.5, *values])
    kept = reference.sample_distribution(logits, temperature, top_k, top_p, min_p)
    assert kept.sum() == pytest.approx(1)
    assert (kept[np.isinf(logits)] == 0).all()
    drawn = np.flatnonzero(kept)
    ranking = sorted(range(logits.size), key=lambda i: (-logits[i], i))
    assert sorted(ranking[: drawn.size]) == list(drawn)
    assert top_k == 0 or drawn.size <= top_k
    full = reference.softmax(logits / temperature)
    np.testing.assert_allclose(kept[drawn], full[drawn] / full[drawn].sum())
    assert kept[drawn].min() >= min_p * kept.max() * (1 - 1e-12)
    candidates = ranking[: top_k or None]
    reached = np.cumsum(full[candidates]) / full[candidates].sum()
    if drawn.size > 1:  # without its last token the prefix falls short of top_p
        assert reached[drawn.size - 2] < top_p + 1e-12
    if drawn.size < len(candidates):  # and it ends for a reason: top_p reached, or the next one under min_p
        following = full[candidates[drawn.size]]
        assert reached[drawn.size - 1] >= top_p - 1e-12 or following <= min_p * full.max() * (1 + 1e-12)
