"""Stop strings: end the text exactly before one, and let none of it out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lily.errors import UsageError

__all__ = ["StopMatcher"]


class StopMatcher:
    """Finds the earliest of several stop strings in text that comes in pieces.

    The text let out is the text before the stop string that begins first, whatever the pieces; it
    is let out as soon as it can't be part of a stop string. Time is linear in the text, whatever
    the number of stops (Aho and Corasick, 1975).

    A stop string that is complete while an earlier, longer one may still be is acted on once that
    is decided: with stops ``abcd`` and ``bc``, the text ``abc`` waits for one character more, or
    for :meth:`finish`.

    Args:
        stops: the stop strings, or one by itself; none at all lets everything through.

    Raises:
        UsageError: a stop is empty or not a string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            stops = [stops]
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise UsageError(f"stop[{index}] is {stop!r:.60}; it must be a string that is not empty")
        self._next: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self._depth: list[int] = [0]
        self._found: list[int] = [0]  # length of the longest stop that ends in this state
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = 0
        self._held = ""
        self._match: int | None = None  # where in the held text the earliest complete stop begins
        self.stopped = False
        """Whether a stop string ended the text."""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; returns the text that may be shown, and whether a stop ended it.

        After the end, further text is ignored.
        """
        if self.stopped:
            return "", True
        seen = len(self._held)
        held = self._held + text
        for position in range(seen, len(held)):
            self._advance(held[position])
            end = position + 1
            if length := self._found[self._state]:
                start = end - length
                self._match = start if self._match is None else min(start, self._match)
            if self._match is not None and end - self._depth[self._state] >= self._match:
                return self._end(held[: self._match]), True
        candidate = len(held) - self._depth[self._state]
        self._held = held[candidate:]
        if self._match is not None:
            self._match -= candidate
        return held[:candidate], False

    def finish(self) -> str:
        """The text still held when no more comes, up to a stop string if one is complete in it."""
        if self._match is not None:
            return self._end(self._held[: self._match])
        rest, self._held, self._state = self._held, "", 0
        return rest

    def _end(self, text: str) -> str:
        self.stopped = True
        self._held, self._match = "", None
        return text

    def _advance(self, character: str) -> None:
        state = self._state
        while state and character not in self._next[state]:
            state = self._fail[state]
        self._state = self._next[state].get(character, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._found.append(0)
            state = self._next[state][character]
        self._found[state] = len(stop)

    def _link(self) -> None:
        """Sets each state's fallback: its longest proper suffix that begins a stop string."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            # A stop of the state's own is longer than any that is a suffix of it.
            self._found[state] = self._found[state] or self._found[self._fail[state]]
            for character, child in self._next[state].items():
                fallback = self._fail[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._next[fallback].get(character, 0)
                queue.append(child)
