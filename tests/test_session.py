"""Sessions: reuse of the past equals a fresh run, pages are shared and given back (cases 1, 3, 5)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lily
from lily.errors import HostError
from lily.step import PAGE_TOKENS

# Prefix reuse changes how a prompt is cut into chunks, so sums are taken in another order; demo logits reach 20.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def engine() -> Iterator[lily.TextEngine]:
    opened = lily.load(max_context=512)
    yield opened
    opened.close()


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3900) for _ in range(count)]


def fresh(engine: lily.TextEngine, prompt: list[int]) -> np.ndarray:
    session = engine.session()
    try:
        return engine.prefill(session, prompt)
    finally:
        session.close()


def test_case_1_a_full_hit_runs_one_token_and_gives_the_same(engine: lily.TextEngine) -> None:
    prompt = tokens(150)
    session = engine.session()
    engine.read(session, prompt[:-1])
    session.remember()
    first = engine.prefill(session, prompt[-1:])
    assert session.reuse(prompt) == len(prompt) - 1
    again = engine.prefill(session, prompt[-1:])
    session.close()
    assert np.array_equal(first, again)


def test_case_3_an_edit_resumes_from_the_nearest_snapshot(engine: lily.TextEngine) -> None:
    prompt = tokens(200)
    session = engine.session()
    for end in (50, 100, 150, 200):
        engine.read(session, prompt[len(session.tokens) : end])
        session.remember()
    edited = prompt[:130] + tokens(40, seed=1)
    assert session.reuse(edited) == 100
    logits = engine.prefill(session, edited[100:])
    session.close()
    assert np.abs(logits - fresh(engine, edited)).max() < TOLERANCE


def test_reuse_without_any_common_past_starts_over(engine: lily.TextEngine) -> None:
    session = engine.session()
    engine.read(session, tokens(70))
    other = tokens(60, seed=2)
    assert session.reuse(other) == 0
    logits = engine.prefill(session, other)
    session.close()
    assert np.array_equal(logits, fresh(engine, other))


def test_a_snapshot_is_not_changed_by_what_follows(engine: lily.TextEngine) -> None:
    prompt = tokens(PAGE_TOKENS + 10)
    session = engine.session()
    engine.read(session, prompt)
    snapshot = session.snapshot()
    first = engine.prefill(session, tokens(90, seed=3))
    session.restore(snapshot)
    engine.prefill(session, tokens(80, seed=4))
    session.restore(snapshot)
    again = engine.prefill(session, tokens(90, seed=3))
    session.forget(snapshot)
    session.close()
    assert np.array_equal(first, again)


def test_sessions_can_start_from_each_others_snapshots(engine: lily.TextEngine) -> None:
    prompt = tokens(100)
    first, second = engine.session(), engine.session()
    engine.read(first, prompt)
    snapshot = first.snapshot()
    used = engine.pool.used
    second.restore(snapshot)
    assert engine.pool.used == used
    engine.read(first, tokens(30, seed=5))
    logits = engine.prefill(second, tokens(20, seed=6))
    first.forget(snapshot)
    for session in (first, second):
        session.close()
    assert np.abs(logits - fresh(engine, prompt + tokens(20, seed=6))).max() < TOLERANCE
    assert engine.pool.used == 0


def test_a_full_pool_is_an_error_and_closing_a_session_mends_it() -> None:
    engine = lily.load(max_context=256, cache_tokens=256)
    first, second = engine.session(), engine.session()
    engine.read(first, tokens(200))
    with pytest.raises(HostError, match="KV cache is full: all 256 tokens are in use; close a session"):
        engine.read(second, tokens(100))
    first.close()
    second.reset()
    engine.read(second, tokens(100))
    second.close()
    engine.close()


def test_a_closed_session_refuses_work(engine: lily.TextEngine) -> None:
    session = engine.session()
    session.close()
    session.close()
    with pytest.raises(HostError, match="session is closed"):
        engine.read(session, tokens(3))


step = st.tuples(
    st.sampled_from(["extend", "edit", "fork", "evict", "remember"]), st.integers(1, 90), st.integers(0, 999)
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(step, min_size=1, max_size=8))
def test_case_5_any_sequence_of_reuse_equals_a_fresh_run(
    engine: lily.TextEngine, steps: list[tuple[str, int, int]]
) -> None:
    """Fork, extend, edit, evict at random; logits at the end equal those of a new session."""
    session = engine.session()
    history: list[int] = tokens(5)
    engine.read(session, history)
    try:
        for action, count, seed in steps:
            if action == "extend":
                history = [*history, *tokens(count, seed)][:400]
            elif action == "edit":
                history = [*history[: max(1, len(history) - count)], *tokens(7, seed)][:400]
            elif action == "remember":
                session.remember()
                continue
            elif action == "evict":
                if session.snapshots:
                    session.evict(session.snapshots[seed % len(session.snapshots)])
                continue
            else:
                copy = engine.session()
                snapshot = session.snapshot()
                copy.restore(snapshot)
                session.forget(snapshot)
                session.close()
                session = copy
            reused = session.reuse(history)
            assert tuple(history[:reused]) == tuple(session.tokens)
            logits = engine.prefill(session, history[reused:])
            assert np.abs(logits - fresh(engine, history)).max() < TOLERANCE
    finally:
        session.close()
    assert engine.pool.used == 0
