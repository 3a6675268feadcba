"""Stop strings: whatever the cuts, the text ends exactly before the stop that begins first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.errors import UsageError
from lily.stops import StopMatcher


def before_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The oracle: the text before the earliest occurrence, by ``str.find``."""
    starts = [start for stop in stops if (start := text.find(stop)) >= 0]
    return (text[: min(starts)], True) if starts else (text, False)


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], bool]:
    shown = [matcher.push(piece)[0] for piece in pieces]
    return [*shown, matcher.finish()], matcher.stopped


CASES = [
    ("The end.\nUser: more", ["\nUser:"]),
    ("aaaaab", ["aab"]),
    ("abcabcabd", ["abcabd"]),
    ("one END two STOP", ["STOP", "END"]),
    ("xabcdy", ["bc", "abcd"]),
    ("xabcey", ["bc", "abcd"]),
    ("xabc", ["abcd", "bc"]),
    ("ushers", ["he", "hers", "she"]),
    ("日本語。終わり。", ["終わり"]),
    ("👩‍👩‍👧 stop", ["👧"]),
    ("almost END", ["END."]),
    ("", ["x"]),
    ("x", ["x"]),
]


@pytest.mark.parametrize(("text", "stops"), CASES)
def test_every_cut_into_three_gives_the_same(text: str, stops: list[str]) -> None:
    expected, stopped = before_stop(text, stops)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [text[:first], text[first:second], text[second:]]
            shown, ended = run(StopMatcher(stops), pieces)
            assert ("".join(shown), ended) == (expected, stopped)


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
)
def test_it_is_str_find_in_pieces(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    expected, stopped = before_stop(text, stops)
    matcher = StopMatcher(stops)
    seen = ""
    for piece in pieces:
        shown, ended = matcher.push(piece)
        seen += shown
        assert expected.startswith(seen)  # nothing of the stop has ever been let out
        assert ended == matcher.stopped
    seen += matcher.finish()
    assert (seen, matcher.stopped) == (expected, stopped)


@settings(deadline=None, max_examples=300)
@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
def test_only_what_may_begin_a_stop_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, ended = matcher.push(text)
    if ended or any(stop in text for stop in stops):
        return
    held = text[len(shown) :]
    prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
    longest = max((p for p in prefixes if text.endswith(p)), key=len, default="")
    assert held == longest


def test_the_stop_is_known_with_its_last_character() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a STO") == ("a ", False)
    assert matcher.push("P and more") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.finish() == ""


def test_a_complete_stop_inside_a_possible_earlier_one_waits_for_the_decision() -> None:
    for last, expected in [("d", ""), ("x", "a")]:
        matcher = StopMatcher(["abcd", "bc"])
        assert matcher.push("abc") == ("", False)
        assert matcher.push(last) == (expected, True)
    undecided = StopMatcher(["abcd", "bc"])
    undecided.push("abc")
    assert (undecided.finish(), undecided.stopped) == ("a", True)


def test_without_stops_all_text_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", False)
    assert matcher.finish() == ""
    assert not matcher.stopped


def test_one_stop_may_come_by_itself() -> None:
    assert StopMatcher("END").push("an END") == ("an ", True)


def test_work_is_linear_in_the_text() -> None:
    """Counts the automaton's steps where comparing every stop at every place would be quadratic."""
    steps = 0

    class Counted(dict[str, int]):
        def __contains__(self, key: object) -> bool:
            nonlocal steps
            steps += 1
            return super().__contains__(key)

    matcher = StopMatcher(["a" * 500 + "b", "a" * 499 + "c"])
    matcher._next = [Counted(edges) for edges in matcher._next]
    text = "a" * 5000
    for character in text:
        matcher.push(character)
    # A character goes one state deeper at most, and each look-up after the first goes one back.
    assert steps <= 2 * len(text)


@pytest.mark.parametrize(("stop", "shown"), [("", "''"), (None, "None"), (5, "5")])
def test_a_stop_that_is_no_text_is_refused(stop: str, shown: str) -> None:
    with pytest.raises(UsageError, match=rf"stop\[1\] is {shown}; it must be a string"):
        StopMatcher(["a", stop])
