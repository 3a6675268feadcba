"""YAML with positions: nodes read one by one, so that every mistake can name its line.

Nothing here knows what a policy is. A reader turns nodes into mappings, lists, words and whole numbers; what does
not fit is noted in :class:`Mistakes` and read as None, so that one pass finds every mistake of a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from lily.errors import PolicyError

__all__ = ["Entry", "Mistakes", "Reader", "compose", "describe", "unknown"]

# Decimal only: YAML 1.1 would also read 010 as eight and 1:30 as ninety.
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]{0,17})")
_INT, _STR, _NULL = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "str", "null"))
_LONGEST_QUOTE = 40


class Mistakes:
    """What is wrong in one file and those it extends, in order of file and line."""

    def __init__(self) -> None:
        # By file, in the order met; a dict, as one mistake may be met twice through two aliases of a node.
        self._found: dict[str, dict[tuple[int, str], None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._found.values()))

    def add(self, file: str, line: int, text: str) -> None:
        """Note one mistake; ``line`` counts from 1."""
        self._found.setdefault(file, {})[line, text] = None

    def extend(self, others: Mistakes) -> None:
        """Note all of the others' mistakes after these."""
        for file, found in others._found.items():
            self._found.setdefault(file, {}).update(found)

    def check(self) -> None:
        """Raise one PolicyError with a line for each mistake, if there are any."""
        lines = [
            f"{file}:{line}: {text}"
            for file, found in self._found.items()
            for line, text in sorted(found, key=lambda mistake: mistake[0])
        ]
        if lines:
            raise PolicyError("\n".join(lines))


@dataclass(frozen=True)
class Entry:
    """One ``key: value`` of a mapping."""

    key: str
    key_node: yaml.Node
    node: yaml.Node

    @property
    def line(self) -> int:
        """Where the key stands, counted from 1."""
        return int(self.key_node.start_mark.line) + 1


def unknown(kind: str, word: str, valid: Collection[str], owner: str = "") -> str:
    """Say that ``word`` is no ``kind``, with the nearest valid word, or all of them if none is near.

    Args:
        owner: ends "unknown <kind> <word>", e.g. "of attention.decode".
    """
    by_lower = {name.lower(): name for name in valid}
    near = difflib.get_close_matches(word.lower(), by_lower, 1, 0.6)
    hint = f"did you mean '{by_lower[near[0]]}'?" if near else f"valid: {', '.join(valid)}"
    return f"unknown {kind} {_quote(word)}{' ' if owner else ''}{owner}; {hint}"


def describe(node: yaml.Node) -> str:
    """A node in a few words, as the end of "… must be a number, not …"."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if node.tag == _NULL:
        return "nothing"
    return _quote(node.value) if node.tag == _STR else _shorten(node.value)


def compose(path: Path, file: str, mistakes: Mistakes) -> yaml.Node | None:
    """The root node of a YAML file; None, with the reason among the mistakes, if it has none.

    Raises:
        PolicyError: the file can't be read.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise PolicyError(f"policy {file} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        mistakes.add(file, line, "not UTF-8 text")
        return None
    try:
        root = _parse(text)
    except yaml.MarkedYAMLError as error:
        _note_syntax(error, text, file, mistakes)
        return None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        mistakes.add(file, line, f"not YAML: character {text[error.position]!r} is not allowed")
        return None
    except RecursionError:
        mistakes.add(file, 1, "not a policy: nested too deeply")
        return None
    if root is None:
        mistakes.add(file, 1, "the file is empty; a policy starts with version: 1")
    return root


def _parse(text: str) -> yaml.Node | None:
    fast = getattr(yaml, "CSafeLoader", None)
    if fast is not None:
        # Ten times faster, but not built everywhere: the other one words a mistake the same on every machine.
        with suppress(yaml.YAMLError):
            return yaml.compose(text, Loader=fast)
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _note_syntax(error: yaml.MarkedYAMLError, text: str, file: str, mistakes: Mistakes) -> None:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark is not None else (0, 0)
    lines = text.splitlines() or [""]
    # An unquoted >= starts a block scalar in YAML, which is what nobody means here.
    hint = "; put a comparison in quotes" if re.search(r":\s*>", lines[min(line, len(lines) - 1)]) else ""
    mistakes.add(file, line + 1, f"not YAML, column {column + 1}: {error.problem or error.context}{hint}")


@dataclass(frozen=True)
class Reader:
    """Reads the nodes of one file; ``what`` is the thing's name in messages."""

    file: str
    mistakes: Mistakes = field(default_factory=Mistakes)

    def mistake(self, at: yaml.Node | Entry, text: str) -> None:
        """Note a mistake on the line of a node or of a key."""
        line = at.line if isinstance(at, Entry) else at.start_mark.line + 1
        self.mistakes.add(self.file, line, text)

    def source(self, node: yaml.Node) -> str:
        """``file:line`` of a node."""
        return f"{self.file}:{node.start_mark.line + 1}"

    def mapping(self, node: yaml.Node, what: str) -> dict[str, Entry] | None:
        """Entries by key; a key that is no word or comes twice is a mistake and left out."""
        if not isinstance(node, yaml.MappingNode):
            self.mistake(node, f"{what} must be a mapping, not {describe(node)}")
            return None
        entries: dict[str, Entry] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.mistake(key_node, f"a key of {what} must be a word, not {describe(key_node)}")
                continue
            key = key_node.value
            entry = Entry(key, key_node, value)
            if key in entries:
                first = entries[key].line
                self.mistake(entry, f"key {_quote(key)} of {what} is given twice, first on line {first}")
                continue
            entries[key] = entry
        return entries

    def known(
        self, entries: Mapping[str, Entry], kind: str, valid: Collection[str], owner: str = ""
    ) -> dict[str, Entry]:
        """The entries whose key is valid; the others are mistakes."""
        for key, entry in entries.items():
            if key not in valid:
                self.mistake(entry, unknown(kind, key, valid, owner))
        return {key: entry for key, entry in entries.items() if key in valid}

    def items(self, node: yaml.Node, what: str) -> list[yaml.Node] | None:
        """The nodes of a list that is not empty."""
        if not isinstance(node, yaml.SequenceNode):
            self.mistake(node, f"{what} must be a list, not {describe(node)}")
            return None
        if not node.value:
            self.mistake(node, f"{what} must not be an empty list")
            return None
        return list(node.value)

    def word(self, node: yaml.Node, what: str) -> str | None:
        """A string that is not empty."""
        if not isinstance(node, yaml.ScalarNode) or node.tag != _STR or not node.value.strip():
            self.mistake(node, f"{what} must be a word, not {describe(node)}")
            return None
        return str(node.value)

    def integer(self, node: yaml.Node) -> int | None:
        """The whole number a node writes in decimal, or None, which is not noted as a mistake."""
        if isinstance(node, yaml.ScalarNode) and node.tag == _INT and _DECIMAL.fullmatch(node.value):
            return int(node.value)
        return None

    def scalar(self, node: yaml.Node, what: str) -> int | str | None:
        """A whole number, or any other single value as the text written."""
        if not isinstance(node, yaml.ScalarNode) or node.tag == _NULL or not node.value.strip():
            self.mistake(node, f"{what} must be a number or a word, not {describe(node)}")
            return None
        number = self.integer(node)
        return str(node.value) if number is None else number


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 1] + "…"


def _quote(text: str) -> str:
    return repr(_shorten(text))
