"""Conditions of ``when`` and ``match``: which values they take, and whether earlier ones leave anything over.

Shape keys are whole numbers without an upper bound, so a condition is a set of intervals. Rules that can never
match, and workloads that no rule matches, are then found exactly, by subtracting boxes of such sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import yaml

from lily.policy.document import Reader, describe, unknown

__all__ = ["Box", "Condition", "Ints", "TooManyPiecesError", "Values", "overlap", "read_condition", "remainder"]

END = 2**63 - 1
"""Stands for no upper bound; larger than any number a policy file may hold."""

_COMPARISON = re.compile(r"\s*(<=|>=|<|>)\s*([0-9]{1,18})\s*")
_RANGE = re.compile(r"\s*([0-9]{1,18})\s*\.\.\s*([0-9]{1,18})\s*")
_FORMS = 'write 8, [4, 8], "< 48", ">= 48" or "16..64" (both ends included)'
_MOST_PIECES = 4096


class TooManyPiecesError(Exception):
    """Rules overlap in so many ways that what they leave over can't be worked out in reasonable time."""


@dataclass(frozen=True)
class Ints:
    """A set of whole numbers: sorted, disjoint, not adjacent, half-open spans."""

    spans: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def union(spans: Iterable[tuple[int, int]]) -> Ints:
        merged: list[tuple[int, int]] = []
        for low, high in sorted(span for span in spans if span[0] < span[1]):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return Ints(tuple(merged))

    @staticmethod
    def span(low: int, high: int = END) -> Ints:
        """``low`` up to but without ``high``."""
        return Ints.union([(low, high)])

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and any(low <= value < high for low, high in self.spans)

    def __and__(self, other: Ints) -> Ints:
        return Ints.union((max(low, start), min(high, stop)) for low, high in self.spans for start, stop in other.spans)

    def __sub__(self, other: Ints) -> Ints:
        edges = [0, *(edge for span in other.spans for edge in span), END]
        gaps = Ints.union(zip(edges[::2], edges[1::2], strict=True))
        return self & gaps

    def __str__(self) -> str:
        return " or ".join(_span_text(low, high) for low, high in self.spans)

    @property
    def edges(self) -> set[int]:
        """Values from which membership differs from that of the value before."""
        return {edge for span in self.spans for edge in span if 0 < edge < END}


def _span_text(low: int, high: int) -> str:
    if high == END:
        return f"{low} and more"
    return str(low) if high == low + 1 else f"{low}..{high - 1}"


Values: TypeAlias = Ints | frozenset[str]
Box: TypeAlias = Mapping[str, Values]
"""A set of workloads: for each key, the values it may have."""


@dataclass(frozen=True)
class Condition:
    """One key of ``when`` or ``match``: the values it takes, and how that was written."""

    values: Values
    written: int | str | tuple[int | str, ...]

    def holds(self, value: int | str) -> bool:
        return value in self.values

    def __str__(self) -> str:
        if isinstance(self.written, tuple):
            return f"one of {', '.join(map(str, self.written))}"
        return str(self.written)


def read_condition(reader: Reader, node: yaml.Node, what: str, words: Sequence[str] | None = None) -> Condition | None:
    """The condition a node writes; None, with a mistake noted, if it is none.

    Args:
        what: the key, for messages.
        words: None where the key is a number; the valid words where it is a word, none given if any will do.
    """
    if isinstance(node, yaml.SequenceNode):
        items = reader.items(node, what)
        if items is None:
            return None
        parts = [_read_single(reader, item, what, words) for item in items]
        if any(part is None for part in parts):
            return None
        read = [part for part in parts if part is not None]
        written = tuple(part.written for part in read if not isinstance(part.written, tuple))
        if words is not None:
            return Condition(frozenset(str(item) for item in written), written)
        spans = [s for part in read if isinstance(part.values, Ints) for s in part.values.spans]
        return Condition(Ints.union(spans), written)
    if words is None:
        compared = _read_comparison(node)
        if compared is not None:
            return compared
    return _read_single(reader, node, what, words)


def _read_single(reader: Reader, node: yaml.Node, what: str, words: Sequence[str] | None) -> Condition | None:
    if words is not None:
        word = reader.word(node, what)
        if word is None:
            return None
        if words and word not in words:
            reader.mistake(node, unknown(what, word, words))
            return None
        return Condition(frozenset([word]), word)
    number = reader.integer(node)
    if number is None or number < 0:
        reader.mistake(node, f"{what} can't be compared with {describe(node)}: {_FORMS}")
        return None
    return Condition(Ints.span(number, number + 1), number)


def _read_comparison(node: yaml.Node) -> Condition | None:
    if not isinstance(node, yaml.ScalarNode):
        return None
    text = " ".join(str(node.value).split())
    if match := _COMPARISON.fullmatch(text):
        number = int(match[2])
        low, high = {
            "<": (0, number),
            "<=": (0, number + 1),
            ">": (number + 1, END),
            ">=": (number, END),
        }[match[1]]
        return Condition(Ints.span(low, high), text)
    if match := _RANGE.fullmatch(text):
        return Condition(Ints.span(int(match[1]), int(match[2]) + 1), text)
    return None


def overlap(left: Values, right: Values) -> Values:
    """Values that are in both."""
    if isinstance(left, Ints) and isinstance(right, Ints):
        return left & right
    if isinstance(left, frozenset) and isinstance(right, frozenset):
        return left & right
    raise TypeError("numbers and words have nothing in common")


def _without(left: Values, right: Values) -> Values:
    if isinstance(left, Ints) and isinstance(right, Ints):
        return left - right
    if isinstance(left, frozenset) and isinstance(right, frozenset):
        return left - right
    raise TypeError("numbers and words have nothing in common")


def _subtract(box: Box, taken: Box) -> list[Box]:
    """What is left of a box; keys that ``taken`` does not have are not limited by it."""
    pieces: list[Box] = []
    rest = dict(box)
    for key, values in taken.items():
        inside = overlap(rest[key], values)
        if not inside:
            return [box]
        outside = _without(rest[key], values)
        if outside:
            pieces.append({**rest, key: outside})
        rest[key] = inside
    return pieces


def remainder(box: Box, taken: Iterable[Box]) -> list[Box]:
    """The parts of a box that none of the boxes ``taken`` takes; none if they cover it.

    Raises:
        TooManyPiecesError: there are over 4,096 parts.
    """
    pieces = [box]
    # Broad boxes first: they leave less to cut up.
    for other in sorted(taken, key=len):
        pieces = [piece for whole in pieces for piece in _subtract(whole, other)]
        if len(pieces) > _MOST_PIECES:
            raise TooManyPiecesError
    return pieces
