"""Philox4x32-10 against the known answers that its authors publish with it (Random123, kat_vectors)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lily.checking.philox import philox, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert philox(counter, key) == words


@given(st.integers(0, ONES), st.integers(0, ONES), st.integers(0, 2**31 - 1))
def test_numbers_lie_from_zero_to_below_one(low: int, high: int, count: int) -> None:
    assert 0.0 <= uniform((low, high), count) < 1.0
