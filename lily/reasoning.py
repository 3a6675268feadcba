"""Thinking apart from answer: splits output at ``<think>`` and ``</think>``, however it is cut."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Kind", "Piece", "ReasoningSplitter", "starts_inside_thinking"]

OPEN = "<think>"
CLOSE = "</think>"

Kind = Literal["reasoning", "content"]


class Piece(NamedTuple):
    """A stretch of output of one kind."""

    kind: Kind
    text: str


def starts_inside_thinking(prompt: str) -> bool:
    """Whether generation after this rendered prompt begins inside a think block.

    Only an assistant turn that is still open counts: a user may well write ``<think>``.
    """
    start = prompt.rfind("<|im_start|>assistant")
    if start < 0:
        return prompt.rstrip().endswith(OPEN)
    turn = prompt[start:]
    return "<|im_end|>" not in turn and turn.rfind(OPEN) > turn.rfind(CLOSE)


class ReasoningSplitter:
    """Splits output into reasoning and content; how the text is cut makes no difference.

    The newlines of the protocol belong to neither: one after ``<think>``, one before ``</think>``
    and two after it. A block of nothing but white space gives no piece. Inside a block, a second
    ``<think>`` before any thought is the first one repeated; outside, a ``</think>`` without its
    beginning is dropped.

    Args:
        starts_inside: the first character is already thought (see :func:`starts_inside_thinking`).
    """

    def __init__(self, starts_inside: bool) -> None:
        self._held = ""
        self._enter("reasoning" if starts_inside else "content", newlines=int(starts_inside))

    def push(self, text: str) -> list[Piece]:
        """Takes the next piece of output; returns what it decides, joined where of one kind."""
        self._held += text
        pieces: list[Piece] = []
        self._drop_newlines()
        while tag := self._next_tag():
            before, _, self._held = self._held.partition(tag)
            inside = self._kind == "reasoning"
            self._show(pieces, before.removesuffix("\n") if inside and tag == CLOSE else before)
            if tag == OPEN:
                self._enter("reasoning", newlines=1)
            elif inside:
                self._enter("content", newlines=2)
            elif not self._begun:
                self._newlines = 2
            self._drop_newlines()
        settled = len(self._held) - self._undecided()
        before, self._held = self._held[:settled], self._held[settled:]
        self._show(pieces, before)
        return pieces

    def finish(self) -> list[Piece]:
        """What is still held when no more comes: a newline, or what could have become a tag."""
        pieces: list[Piece] = []
        self._show(pieces, self._held)
        self._held = ""
        return pieces

    def _enter(self, kind: Kind, *, newlines: int) -> None:
        self._kind: Kind = kind
        self._newlines = newlines  # of the protocol, still to be dropped
        self._begun: bool = False  # something other than white space was shown since the last tag
        self._blank = ""  # white space a thought began with, dropped if nothing follows

    def _drop_newlines(self) -> None:
        while self._newlines and self._held.startswith("\n"):
            self._held = self._held[1:]
            self._newlines -= 1
        if self._held:
            self._newlines = 0

    def _next_tag(self) -> str | None:
        """The tag that comes first in the held text and means something there."""
        opens, closes = self._held.find(OPEN), self._held.find(CLOSE)
        if self._kind == "reasoning" and (self._begun or self._held[: max(opens, 0)].strip()):
            opens = -1  # once there is thought, it may speak of the tag
        if opens < 0 or 0 <= closes < opens:
            return CLOSE if closes >= 0 else None
        return OPEN

    def _undecided(self) -> int:
        """Length of the longest end of the held text that more text could turn into a tag."""
        tags = ("\n" + CLOSE, CLOSE, OPEN) if self._kind == "reasoning" else (CLOSE, OPEN)
        for length in range(min(len(self._held), len(CLOSE)), 0, -1):
            if any(tag.startswith(self._held[-length:]) for tag in tags):
                return length
        return 0

    def _show(self, pieces: list[Piece], text: str) -> None:
        if self._kind == "reasoning" and not self._begun:
            self._blank += text
            if not text.strip():
                return
            text, self._blank = self._blank, ""
        if not text:
            return
        self._begun = self._begun or bool(text.strip())
        if pieces and pieces[-1].kind == self._kind:
            text = pieces.pop().text + text
        pieces.append(Piece(self._kind, text))
