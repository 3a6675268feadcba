"""Sampling parameters: legal ranges, defaults, greedy."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.errors import UsageError
from lily.generation_config import GenerationDefaults
from lily.sampling import LEGAL, SamplingParams


def test_the_defaults_are_greedy_and_change_no_logit() -> None:
    params = SamplingParams()
    assert params.greedy
    assert (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty) == (1.0, 0.0)
    assert params.seed is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 100),
        ("top_k", 2**31 - 1),
        ("top_p", 1e-9),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1),
        ("repetition_penalty", 0.01),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("seed", 0),
        ("seed", 2**64 - 1),
    ],
)
def test_bounds_are_legal(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", True),
        ("temperature", "0.7"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0),
        ("repetition_penalty", 11),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("seed", False),
        *((field, value) for field in LEGAL for value in (math.nan, math.inf, -math.inf)),
    ],
)
def test_what_is_not_legal_is_refused_with_field_value_and_range(field: str, value: Any) -> None:
    with pytest.raises(UsageError) as raised:
        SamplingParams(**{field: value})
    assert str(raised.value) == f"{field} is {value!r}; it must be {LEGAL[field]}"


def test_a_range_reads_as_a_sentence() -> None:
    assert str(LEGAL["top_p"]) == "a number above 0 to 1 (1 turns it off)"
    assert str(LEGAL["top_k"]) == "a whole number from 0 to 2147483647 (0 turns it off)"


@settings(deadline=None)
@given(st.sampled_from(sorted(LEGAL)), st.integers() | st.floats() | st.text(max_size=3))
def test_any_value_is_accepted_as_it_is_or_refused(field: str, value: Any) -> None:
    try:
        params = SamplingParams(**{field: value})
    except UsageError:
        return
    kept = getattr(params, field)
    assert kept == value
    assert math.isfinite(kept)
    assert isinstance(kept, int if LEGAL[field].integer else float)


def test_numpy_numbers_become_plain_ones() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**63))
    assert (type(params.temperature), type(params.top_k), type(params.seed)) == (float, int, int)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(temperature=0), True),
        (SamplingParams(temperature=1e-6), True),
        (SamplingParams(temperature=1e-5), False),
        (SamplingParams(temperature=1, top_k=1), True),
        (SamplingParams(temperature=1, top_k=2), False),
    ],
)
def test_greedy(params: SamplingParams, greedy: bool) -> None:
    assert params.greedy is greedy


def test_parameters_never_change() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


def test_overrides_win_and_none_means_not_chosen() -> None:
    defaults = GenerationDefaults(temperature=0.7, top_k=20, top_p=0.95, do_sample=True)
    params = SamplingParams.from_defaults(defaults, temperature=None, top_k=5, seed=7)
    assert params == SamplingParams(temperature=0.7, top_k=5, top_p=0.95, seed=7)


def test_without_defaults_it_is_greedy() -> None:
    assert SamplingParams.from_defaults(GenerationDefaults()) == SamplingParams()


def test_do_sample_decides_the_temperature() -> None:
    off = GenerationDefaults(temperature=0.7, do_sample=False)
    assert SamplingParams.from_defaults(off).greedy
    assert SamplingParams.from_defaults(off, temperature=0.3).temperature == 0.3
    assert SamplingParams.from_defaults(GenerationDefaults(do_sample=True)).temperature == 1.0


def test_an_unknown_override_is_named() -> None:
    with pytest.raises(UsageError, match=r"unknown sampling parameter 'temprature'.*temperature"):
        SamplingParams.from_defaults(GenerationDefaults(), temprature=1.0)
