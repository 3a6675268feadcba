"""One policy file as written: its keys read and checked, before anything it extends is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from lily.ops import OPS
from lily.policy.conditions import Condition, read_condition
from lily.policy.document import Entry, Mistakes, Reader, compose, describe
from lily.policy.execution import SETTINGS
from lily.policy.rules import OpRules, check_reachable, read_rules

__all__ = ["MATCH_KEYS", "PolicyFile", "read_file"]

VERSION = 1
TOP_KEYS = ("version", "name", "extends", "match", "execution", "kernels")
MATCH_KEYS = ("host", "generation", "suffix", "gpu_cores")
"""What a device is matched by: the kind of host; of an Apple GPU also its architecture's number, letter and cores."""

_WORD_KEYS = ("host", "suffix")


@dataclass(eq=False)
class PolicyFile:
    """One policy file as read: what it says itself, and what is wrong with it.

    ``whole`` says that nothing was lost of which ops it has rules for: then an op without any is a mistake too.
    """

    path: Path
    file: str
    mistakes: Mistakes = field(default_factory=Mistakes)
    name: str = ""
    extends: str | None = None
    extends_line: int = 1
    kernels_line: int = 1
    match: dict[str, Condition] = field(default_factory=dict)
    execution: dict[str, int | str] = field(default_factory=dict)
    kernels: dict[str, OpRules] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    whole: bool = False


def read_file(path: Path, file: str) -> PolicyFile:
    """Read one file.

    Args:
        file: what messages call it.

    Raises:
        PolicyError: the file can't be read. What is wrong in it is left in ``PolicyFile.mistakes``.
    """
    found = PolicyFile(path, file, name=path.stem)
    root = compose(path, file, found.mistakes)
    if root is None:
        return found
    reader = Reader(file, found.mistakes)
    entries = reader.mapping(root, "a policy")
    if entries is None:
        return found
    top = reader.known(entries, "key", TOP_KEYS)
    found.whole = not found.mistakes
    _read_version(reader, root, top)
    if "name" in top:
        name = reader.word(top["name"].node, "name")
        if name is not None and not name.isprintable():
            reader.mistake(top["name"].node, f"name must be printable, not {name!r}")
        found.name = name or found.name
    if "extends" in top:
        found.extends = reader.word(top["extends"].node, "extends")
        found.whole = found.whole and found.extends is not None
        found.extends_line = top["extends"].line
    if "match" in top:
        _read_match(reader, top["match"].node, found)
    if "execution" in top:
        _read_execution(reader, top["execution"].node, found)
    if "kernels" in top:
        found.kernels_line = top["kernels"].line
        _read_kernels(reader, top["kernels"].node, found)
    return found


def _read_version(reader: Reader, root: yaml.Node, top: Mapping[str, Entry]) -> None:
    if "version" not in top:
        reader.mistake(root, f"version is missing; write version: {VERSION}")
        return
    node = top["version"].node
    if reader.integer(node) != VERSION:
        reader.mistake(node, f"version must be {VERSION}, not {describe(node)}")


def _read_match(reader: Reader, node: yaml.Node, found: PolicyFile) -> None:
    entries = reader.mapping(node, "match") or {}
    for key, entry in reader.known(entries, "key", MATCH_KEYS, "in match").items():
        if key == "host" and not isinstance(entry.node, yaml.ScalarNode):
            reader.mistake(entry.node, f"match.host must be one host, not {describe(entry.node)}")
            continue
        words = () if key in _WORD_KEYS else None
        condition = read_condition(reader, entry.node, f"match.{key}", words)
        if condition is None:
            continue
        if not condition.values:
            reader.mistake(entry.node, f"match.{key} is never {condition}")
        found.match[key] = condition
        found.sources[f"match.{key}"] = reader.source(entry.key_node)


def _read_execution(reader: Reader, node: yaml.Node, found: PolicyFile) -> None:
    entries = reader.mapping(node, "execution") or {}
    for key, entry in reader.known(entries, "setting", tuple(SETTINGS), "in execution").items():
        setting = SETTINGS[key]
        number = reader.integer(entry.node)
        value = entry.node.value if number is None else number
        if not setting.accepts(value):
            reader.mistake(entry.node, f"{key} must be {setting}, not {describe(entry.node)}")
            continue
        found.execution[key] = value
        found.sources[f"execution.{key}"] = reader.source(entry.key_node)


def _read_kernels(reader: Reader, node: yaml.Node, found: PolicyFile) -> None:
    before = len(reader.mistakes)
    entries = reader.mapping(node, "kernels") or {}
    known = reader.known(entries, "op", tuple(OPS), "in kernels")
    found.whole = found.whole and len(reader.mistakes) == before
    for op, entry in known.items():
        found.kernels[op] = read_rules(reader, op, entry.node)
        check_reachable(found.kernels[op].rules, found.mistakes)
