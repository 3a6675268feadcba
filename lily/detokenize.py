"""Text from tokens as they arrive: complete characters only."""

from __future__ import annotations

import codecs
from collections.abc import Set as AbstractSet
from typing import Protocol

__all__ = ["Detokenizer", "TokenBytes"]


class TokenBytes(Protocol):
    """What a detokenizer needs of a tokenizer."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for."""


class Detokenizer:
    """Turns one sequence of tokens into text, holding back a character that is not complete yet.

    The pieces joined are what decoding the whole sequence at once gives, so U+FFFD appears only for
    bytes that are not UTF-8 in any case, a last character cut short among them.

    Args:
        tokenizer: source of bytes and special ids, usually a :class:`lily.tokenizer.Tokenizer`.
        hide_special: leave out the tokenizer's special tokens (end of turn and the like). Markers
            that a parser reads, such as ``<think>`` and ``<tool_call>``, are text and always pass.
    """

    def __init__(self, tokenizer: TokenBytes, *, hide_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden: AbstractSet[int] = tokenizer.special_ids if hide_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that ``token_id`` completes, possibly none.

        Raises:
            UsageError: the id has no token.
        """
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is still held at the end of the sequence; then it is ready for another."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
