"""Whether a model fits: sizes against model_spec §10, verdicts at their edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lily.catalog import find_model
from lily.config import load_config
from lily.fit import PROGRAM_BYTES, ModelSize, model_size
from lily.policy import Policy
from lily.step import PAGE_TOKENS
from tests.recording import recording_registry

SIZE = ModelSize("m", 1000, checkpoint_bytes=10**9, state_bytes=2, kv_page_bytes=640, scratch_bytes=3)
FIXED = 10**9 + 5 + PROGRAM_BYTES


def test_sizes_of_the_35b_model() -> None:
    registry = recording_registry("metal")
    config = load_config(find_model("qwen3.6-35b-a3b").path)
    size = model_size(config, "big", Policy.load("m5max", registry), registry)
    assert size.limit == 262_144
    assert size.checkpoint_bytes == 19_508_789_376
    assert size.state_bytes == 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert size.kv_bytes(32_768) == 640 << 20
    assert size.kv_bytes(262_144) == 5 << 30
    # A chunk of 2,048 rows at the width of 2,048 needs tens of these, and not hundreds.
    assert 10 <= size.scratch_bytes / (2048 * 2048 * 2) <= 100


def test_scratch_is_that_of_a_chunk_not_of_the_context() -> None:
    registry = recording_registry("cpu")
    policy = Policy.load("cpu", registry)
    config = load_config(find_model("demo").path)
    scratch = model_size(config, "demo", policy, registry).scratch_bytes
    assert scratch < policy.execution.prefill_chunk * config.hidden_size * 4 * 100


@pytest.mark.parametrize(
    ("available", "verdict", "words"),
    [
        (FIXED + 16 * 640, "yes", "it needs 1.20 GB and 1.20 GB are available"),
        (FIXED + 16 * 640 - 1, "no", "the largest context that fits is 960"),
        (FIXED + 640, "no", "the largest context that fits is 64"),
        (FIXED + 639, "slow", "weights would be read from disk again and again"),
        (FIXED - 10**9 + 16 * 640, "slow", "but only 0.20 GB are available"),
        (FIXED - 10**9 + 16 * 640 - 1, "no", "less than the 0.20 GB it needs beside its weights"),
        (None, "unknown", "does not say how much is available"),
    ],
)
def test_verdicts_at_their_edges(available: int | None, verdict: str, words: str) -> None:
    fit = SIZE.fit(1000, available)
    assert (fit.context, fit.kv_bytes, fit.needed_bytes) == (1000, 16 * 640, FIXED + 16 * 640)
    assert fit.verdict == verdict
    assert words in fit.reason


@given(st.integers(0, 2 * FIXED))
def test_the_largest_context_fits_and_a_page_more_does_not(available: int) -> None:
    context = SIZE.largest_context(available)
    assert 0 <= context <= SIZE.limit
    if context:
        assert SIZE.fit(context, available).verdict == "yes"
    if context < SIZE.limit:
        assert SIZE.fit(min(context + PAGE_TOKENS, SIZE.limit), available).verdict != "yes"
