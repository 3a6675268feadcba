"""The CPU sampler against the float64 oracle: which token, how often, and what is noted about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lily_builtin.cpu_sample import VARIANTS

from lily.checking import Harness
from lily.checking.philox import uniform
from lily.hosts.cpu import CpuHost
from lily.ops import Op
from lily.plan import Plan
from lily.reference import penalise, sample_distribution
from lily.registry import Registry
from lily.step import RING, STEP_DTYPE
from tests.kernels.workbench import ISAS, Workbench, named

DEVICE = named(VARIANTS, "sample", "device")
OFF = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
REAL_VOCAB = 248_320


@pytest.mark.parametrize("isa", ISAS)
def test_draws_meet_the_oracle(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting that the harness has; threads and leftovers in memory change nothing."""
    monkeypatch.setenv("LILY_CPU_ISA", isa)
    harness = Harness(CpuHost(threads=2), Registry(), policies=[])
    results = harness.check_variant(DEVICE)
    harness.close()
    assert not [str(result) for result in results if not result.passed]


class Sampler:
    """One session's sampling state on a workbench, with a plan that is recorded once."""

    def __init__(self, bench: Workbench, logits: Any, mask: Any = None, *, advance: int = 1, **settings: Any) -> None:
        self.bench, self.vocab, self.advance = bench, len(logits), advance
        self.logits = bench.tensor(logits)
        self.mask = bench.tensor(np.ones(self.vocab) if mask is None else mask, "u8")
        self.counts = bench.tensor(np.zeros((2, self.vocab)), "i32")
        step: Any = np.zeros(1, STEP_DTYPE)
        for name, value in {**OFF, "seed_low": 1234, "seed_high": 5, **settings}.items():
            step[name] = value
        self.step = bench.tensor(step.view(np.int32), "i32")
        operands = {"logits": self.logits, "mask": self.mask, "counts": self.counts, "step": self.step}
        shape = {"rows": advance, "vocab": self.vocab}
        op = Op("sample", "decode" if advance == 1 else "prefill", "sample", shape, operands, {"advance": advance})
        plan = Plan(arena=bench.place)
        DEVICE.record(op, plan, {})
        self._prepared = bench.host.prepare(plan)

    def draw(self, times: int = 1) -> list[int]:
        """Run the plan that many times; the tokens."""
        tokens = []
        for _ in range(times):
            self.bench.host.submit(self._prepared, self.bench.buffers).wait()
            tokens.append(int(self.state["token"]))
        return tokens

    @property
    def state(self) -> Any:
        return self.bench.read(self.step).view(STEP_DTYPE)[0]


@pytest.fixture(params=ISAS)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    monkeypatch.setenv("LILY_CPU_ISA", request.param)
    workbench = Workbench(threads=1)
    yield workbench
    workbench.close()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "top-k": {"top_k": 12},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_are_those_of_the_distribution(bench: Workbench, name: str) -> None:
    """2,000 draws, chi-square: below the 99.99 % point of its distribution (Wilson and Hilferty's approximation)."""
    rng = np.random.default_rng(11)
    logits = (rng.normal(size=50) * 1.5).astype(np.float32)
    mask = np.arange(50) % 9 != 4
    draws = 2000
    sampler = Sampler(bench, logits, mask, **SETTINGS[name])
    counts = np.bincount(sampler.draw(draws), minlength=50)
    wanted = sample_distribution(np.where(mask, logits, -np.inf), **SETTINGS[name])
    assert counts[wanted == 0].sum() == 0
    expected = wanted * draws
    rare = expected < 5  # too few for the approximation: one class together
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


@pytest.mark.parametrize("name", SETTINGS)
def test_each_draw_inverts_the_cumulative_distribution(bench: Workbench, name: str) -> None:
    """The token is the one at which the oracle's running sum, in order of id, passes the generator's number.

    Where that lies within 1e-5 of a step of the sum, float32 may fall on either side.
    """
    logits = (np.random.default_rng(12).normal(size=3000) * 2).astype(np.float32)
    sampler = Sampler(bench, logits, seed_low=77, seed_high=1 << 31, **SETTINGS[name])
    cumulative = np.cumsum(sample_distribution(logits, **SETTINGS[name]))
    undecided = 0
    for count, token in enumerate(sampler.draw(60)):
        number = uniform((77, 1 << 31), count)
        candidates = {int(np.searchsorted(cumulative, number + shift, side="right")) for shift in (-1e-5, 0, 1e-5)}
        undecided += len(candidates) > 1
        assert token in candidates, count
    assert undecided < 10


def test_a_seed_gives_the_same_tokens_and_another_one_others(bench: Workbench) -> None:
    logits = np.zeros(1000)
    first, again = (Sampler(bench, logits).draw(80) for _ in range(2))
    assert first == again
    assert Sampler(bench, logits, seed_low=1235).draw(80) != first
    assert Sampler(bench, logits, seed_high=6).draw(80) != first


def test_the_step_parameters_move_on(bench: Workbench) -> None:
    """Token, ring (past its end too), count, position; nothing else changes."""
    sampler = Sampler(bench, np.zeros(500), advance=17, position=40, count=RING - 3, token=9)
    before = sampler.state.copy()
    tokens = sampler.draw(6)
    after = sampler.state
    assert (after["position"], after["count"], after["token"]) == (40 + 6 * 17, RING + 3, tokens[-1])
    assert [int(after["ring"][i % RING]) for i in range(RING - 3, RING + 3)] == tokens
    assert not after["ring"][3 : RING - 3].any()
    for field in ("temperature", "top_k", "top_p", "min_p", "seed_low", "seed_high", "reserved", "frequency_penalty"):
        assert np.array_equal(after[field], before[field])
    counts = np.bincount(tokens, minlength=500)
    assert np.array_equal(bench.read(sampler.counts), [counts, counts])


@pytest.mark.parametrize("vocab", [1, 3, 15, 16, 17, 63, 64, 65, 255, 257, 4096])
def test_greedy_takes_the_largest_and_the_lowest_of_equals(bench: Workbench, vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32)
    places = sorted({0, vocab // 2, vocab - 1})
    logits[places] = 9.0
    for i, place in enumerate(places):
        assert Sampler(bench, logits, temperature=0.0).draw() == [place]
        mask = np.ones(vocab)
        mask[places[: i + 1]] = 0
        if i + 1 < len(places):
            assert Sampler(bench, logits, mask, temperature=0.0).draw() == [places[i + 1]]
        logits[place] = -9.0


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 0.7, 100.0])
def test_what_is_no_number_or_has_no_token_is_never_chosen(bench: Workbench, temperature: float) -> None:
    logits = np.full(100, np.nan)
    logits[::3], logits[50], logits[51] = -np.inf, 1.0, np.inf
    mask = np.ones(100)
    mask[51] = 0
    sampler = Sampler(bench, logits, mask, temperature=temperature, repetition_penalty=1.5)
    assert set(sampler.draw(20)) == {50}
    # Where nothing is left, an id that has a token is better than one that has none.
    mask[:7] = 0
    assert Sampler(bench, np.full(100, np.nan), mask, temperature=temperature).draw() == [7]


def test_filters_keep_the_lowest_ids_of_equals(bench: Workbench) -> None:
    """All logits equal: top-k and top-p keep a prefix of the ids."""
    assert set(Sampler(bench, np.zeros(1000), top_k=5).draw(100)) == set(range(5))
    assert set(Sampler(bench, np.zeros(1000), top_p=0.0045).draw(100)) == set(range(5))
    assert set(Sampler(bench, np.zeros(1000), top_k=10, top_p=0.25).draw(100)) == set(range(3))
    assert set(Sampler(bench, np.zeros(1000), min_p=1.0, top_k=3).draw(60)) == set(range(3))


def test_penalties_follow_the_oracle_as_tokens_are_generated(bench: Workbench) -> None:
    """Greedy with all three penalties: each token changes the counts that the next one is drawn from."""
    logits = (np.random.default_rng(5).normal(size=200) * 2).astype(np.float32)
    penalties: dict[str, Any] = {"repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": 0.75}
    sampler = Sampler(bench, logits, temperature=0.0, **penalties)
    counts = np.zeros((2, 200), np.int64)
    counts[0, [3, 5, 7]] = 2  # seen in the prompt, not generated
    bench.write(sampler.counts, counts)
    tokens = sampler.draw(40)
    assert len(set(tokens)) > 10
    for token in tokens:
        values = penalise(logits, counts[0], counts[1], repetition=1.25, presence=0.5, frequency=0.75)
        assert values[token] >= values.max() - 1e-5  # nearer than float32 tells apart
        counts[:, token] += 1
    assert np.array_equal(bench.read(sampler.counts), counts)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
        {"top_p": 0.95},
        {"top_p": 0.999, "temperature": 4.0},
        {"top_k": 100_000},
        {"min_p": 0.05},
    ],
    ids=str,
)
def test_the_real_vocabulary(bench: Workbench, settings: dict[str, Any]) -> None:
    """248,320 ids, the last 271 without a token: draws lie where the oracle has probability."""
    logits = (np.random.default_rng(8).normal(size=REAL_VOCAB) * 3).astype(np.float32)
    logits[-100] = 50.0
    mask = np.arange(REAL_VOCAB) < REAL_VOCAB - 271
    wanted = sample_distribution(np.where(mask, logits, -np.inf), **settings)
    tokens = Sampler(bench, logits, mask, **settings).draw(8)
    assert all(wanted[token] > 0 for token in tokens)
    assert (len(set(tokens)) == 1) == (settings.get("temperature") == 0.0)
