"""The engine, token by token: chunks, policies, hand-off, sampling, limits (cases 15, 18, 21, 23)."""

from __future__ import annotations

import _thread
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import lily
from lily.catalog import find_model
from lily.config import load_config
from lily.engine import record_step
from lily.errors import ContextLengthError, HostError, UsageError
from lily.hosts.cpu import CpuHost
from lily.hosts.meta import MetaHost
from lily.memory import KvPool
from lily.model import StepShape
from lily.op_table import Phase
from lily.policy import Policy
from lily.registry import default_registry
from lily.weights import abstract_weights

TOLERANCE = 5e-4  # float32 sums in another order; demo logits reach 20


@pytest.fixture(scope="module")
def engine() -> Iterator[lily.TextEngine]:
    opened = lily.load(max_context=2048)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def prompt(engine: lily.TextEngine) -> list[int]:
    assert engine.template is not None
    text = engine.template.render([{"role": "user", "content": "Tell me a story about a fox and a river."}])
    return engine.tokenizer.encode(text)


def policy(folder: Path, text: str) -> str:
    path = folder / "experiment.yaml"
    path.write_text(f"version: 1\nname: experiment\nextends: cpu.yaml\n{text}\n")
    return str(path)


def greedy(engine: lily.TextEngine, prompt: list[int], count: int) -> list[int]:
    session = engine.session()
    try:
        return list(engine.generate(session, prompt, max_tokens=count))
    finally:
        session.close()


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
def test_case_23_any_chunk_size_gives_the_same(
    engine: lily.TextEngine, prompt: list[int], chunk: int, tmp_path: Path
) -> None:
    other = lily.load(policy=policy(tmp_path, f"execution: {{prefill_chunk: {chunk}}}"), max_context=2048)
    text = prompt + greedy(engine, prompt, 80)
    assert np.abs(other.logits(text) - engine.logits(text)).max() < TOLERANCE
    assert greedy(other, prompt, 40) == greedy(engine, prompt, 40)
    other.close()


def test_step_by_step_equals_prefill(engine: lily.TextEngine, prompt: list[int]) -> None:
    text = prompt[:60]
    session = engine.session()
    steps = np.stack([engine.decode(session, token) for token in text])
    session.close()
    assert np.abs(steps - engine.logits(text)).max() < TOLERANCE


def test_case_23_four_thousand_steps_of_decay_stay_finite() -> None:
    engine = lily.load(max_context=4100)
    session = engine.session()
    engine.read(session, [7] * 4000)
    logits = engine.decode(session, 7)
    state = engine.host.read(session.buffer("state"), 0, "<f4", session.buffer("state").nbytes // 4)
    session.close()
    engine.close()
    assert np.isfinite(logits).all()
    assert np.isfinite(state).all()


@pytest.mark.parametrize(
    "text",
    [
        "execution: {token_handoff: host}",
        "execution: {in_flight: 1}",
        "execution: {in_flight: 4}",
        "execution: {encoder: serial}",
    ],
)
def test_execution_settings_do_not_change_a_byte(
    engine: lily.TextEngine, prompt: list[int], text: str, tmp_path: Path
) -> None:
    other = lily.load(policy=policy(tmp_path, text), max_context=2048)
    params = lily.SamplingParams(temperature=0.8, top_k=40, seed=11)
    sampled = []
    for each in (engine, other):
        session = each.session()
        sampled.append(list(each.generate(session, prompt, params, max_tokens=60)))
        assert session.tokens == [*prompt, *sampled[-1]][: len(session.tokens)]
        session.close()
    assert sampled[0] == sampled[1]
    assert np.array_equal(other.logits(prompt), engine.logits(prompt))
    other.close()


def test_threads_do_not_change_a_byte(engine: lily.TextEngine, prompt: list[int], tmp_path: Path) -> None:
    other = lily.load(policy=policy(tmp_path, "execution: {threads: 3}"), max_context=2048)
    assert isinstance(other.host, CpuHost)
    assert other.host.threads == 3
    assert np.array_equal(other.logits(prompt), engine.logits(prompt))
    other.close()


@pytest.mark.parametrize("stop_after", [1, 2, 5, 17])
def test_the_session_knows_what_was_read_however_generation_ends(
    engine: lily.TextEngine, prompt: list[int], stop_after: int
) -> None:
    expected = greedy(engine, prompt, 40)
    session = engine.session()
    taken = list(itertools.islice(stream := engine.generate(session, prompt, max_tokens=40), stop_after))
    stream.close()  # type: ignore[attr-defined]
    assert taken == expected[:stop_after]
    read = session.tokens[len(prompt) :]
    assert read == expected[: len(read)]
    assert len(read) >= stop_after - 1
    rest = [*prompt, *expected][len(session.tokens) :][:10]
    logits = engine.prefill(session, rest)
    session.close()
    assert np.abs(logits - engine.logits([*prompt, *expected][: len(prompt) + len(read) + 10])[-1]).max() < TOLERANCE


def test_case_15_max_tokens_and_stop_ids_end_generation(engine: lily.TextEngine, prompt: list[int]) -> None:
    expected = greedy(engine, prompt, 30)
    assert greedy(engine, prompt, 1) == expected[:1]
    session = engine.session()
    stop = expected[9]
    got = list(engine.generate(session, prompt, max_tokens=30, stop_ids=[stop]))
    session.close()
    assert got == expected[: expected.index(stop) + 1]


def test_generation_ends_with_the_context(prompt: list[int]) -> None:
    engine = lily.load(max_context=len(prompt) + 5)
    session = engine.session()
    assert len(list(engine.generate(session, prompt))) == 6
    assert len(session.tokens) == len(prompt) + 5
    session.close()
    engine.close()


def test_case_18_an_overlong_prompt_is_refused_with_both_numbers(prompt: list[int]) -> None:
    engine = lily.load(max_context=20)
    session = engine.session()
    engine.read(session, prompt[:5])
    with pytest.raises(ContextLengthError, match="the prompt is 25 tokens long but the context holds 20") as caught:
        engine.prefill(session, prompt[:20])
    assert (caught.value.prompt_tokens, caught.value.context_tokens) == (25, 20)
    assert session.tokens == prompt[:5]
    engine.read(session, prompt[5:20])
    session.close()
    engine.close()


@pytest.mark.parametrize(
    ("ids", "message"), [([], "prompt is empty"), ([5000], "token id 5000 is outside"), ([-1], "-1")]
)
def test_tokens_that_do_not_exist_are_refused(engine: lily.TextEngine, ids: list[int], message: str) -> None:
    session = engine.session()
    with pytest.raises(UsageError, match=message):
        engine.read(session, ids)
    with pytest.raises(UsageError, match=message):
        list(engine.generate(session, ids))
    session.close()


def test_the_same_seed_gives_the_same_text_and_another_does_not(engine: lily.TextEngine, prompt: list[int]) -> None:
    def sample(seed: int | None) -> list[int]:
        session = engine.session()
        params = lily.SamplingParams(temperature=1.0, seed=seed)
        out = list(engine.generate(session, prompt, params, max_tokens=25))
        session.close()
        return out

    assert sample(3) == sample(3)
    assert len({tuple(sample(seed)) for seed in (3, 4, 5, None, None)}) == 5


def test_rows_without_a_token_are_never_sampled(prompt: list[int]) -> None:
    engine = lily.load(max_context=512)
    mask = np.zeros(engine.config.vocab_size, np.uint8)
    mask[100:120] = 1
    engine.host.write(engine._mask, 0, mask)  # as if the tokenizer had only these twenty
    session = engine.session()
    params = lily.SamplingParams(temperature=50.0, seed=1)
    seen = set(engine.generate(session, prompt, params, max_tokens=200))
    session.close()
    engine.close()
    assert seen <= set(range(100, 120))
    assert len(seen) > 10


def test_penalties_make_repetition_rarer(engine: lily.TextEngine, prompt: list[int]) -> None:
    def distinct(**penalties: float) -> int:
        session = engine.session()
        params = lily.SamplingParams(**penalties)  # type: ignore[arg-type]
        out = list(engine.generate(session, prompt, params, max_tokens=120))
        session.close()
        return len(set(out))

    plain = distinct()
    assert distinct(repetition_penalty=1.3) > plain
    assert distinct(presence_penalty=2.0) > plain
    assert distinct() == plain


def test_case_21_scratch_does_not_grow_with_the_prompt(tmp_path: Path) -> None:
    """An allocation counter: the peak is the same for a prompt of 2, 8 and 30 chunks; KV is reserved up front."""
    name = policy(tmp_path, "execution: {prefill_chunk: 256}")
    engine = lily.load(policy=name, max_context=8192)
    session = engine.session()
    peaks = []
    for chunks in (2, 8, 30):
        session.reset()
        engine.read(session, [11] * (256 * chunks))
        engine.decode(session, 12)
        peaks.append(engine.host.peak_bytes)
    session.close()
    engine.close()
    assert peaks[0] == peaks[1] == peaks[2]


def test_ctrl_c_in_a_prefill_leaves_the_session_to_be_rewound(engine: lily.TextEngine, prompt: list[int]) -> None:
    session = engine.session()
    engine.read(session, prompt)
    session.remember()
    logits = engine.prefill(session, [5, 6, 7])
    threading.Timer(0.05, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        while True:
            session.reset()
            engine.read(session, [9] * 1500)
    if not session.valid:
        with pytest.raises(HostError, match="failed half-way"):
            engine.read(session, [1])
    assert session.reuse([*prompt, 5, 6, 7]) == len(prompt)
    assert np.array_equal(engine.prefill(session, [5, 6, 7]), logits)
    session.close()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_case_21_scratch_is_the_same_at_8k_64k_and_200k_for_the_real_shape(phase: Phase) -> None:
    registry = default_registry()
    policy = Policy.load("cpu", registry)
    weights = abstract_weights(load_config(find_model("qwen3.6-35b-a3b").path))
    rows = policy.execution.prefill_chunk if phase == "prefill" else 1
    sizes = []
    for context in (8_192, 65_536, 200_000):
        host = MetaHost()
        pool = KvPool(host, weights.config, 262_144, policy.execution.kv_dtype)
        shape = StepShape(phase, rows, context, "sample")
        recorder = record_step(weights, host, policy, registry, shape, pool, 262_144)
        sizes.append((recorder.activation_bytes, recorder.temporary_bytes))
    activations, temporaries = zip(*sizes, strict=True)
    assert len(set(activations)) == 1
    # From 32K on decode splits its reads into a fixed number of blocks, whose partial sums are a few megabytes.
    assert len(set(temporaries[1:])) == 1
    assert temporaries[1] - temporaries[0] < 4 << 20
