"""docs/policies.md against the code: its examples load, and its tables are complete and right."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from lily.ops import OPS
from lily.policy import SETTINGS, Execution, Policy
from lily.policy.file import MATCH_KEYS, TOP_KEYS
from tests.variants import registry

TEXT = (Path(__file__).parent.parent / "docs" / "policies.md").read_text("utf-8")
BOTH = registry("cpu", "metal")


def row(first: str) -> list[str]:
    """The cells of the table row that starts with `first`."""
    lines = [line for line in TEXT.splitlines() if line.startswith(f"| `{first}` |")]
    assert len(lines) == 1, f"{first} must have one row"
    return [cell.strip() for cell in lines[0].strip("|").split("|")]


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL), ids=["five lines", "the file"])
def test_examples_load(example: str, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(example)
    assert Policy.load(path, BOTH).missing_variants(BOTH) == []


@pytest.mark.parametrize("op", OPS)
def test_ops(op: str) -> None:
    _, phases, keys = row(op)
    assert phases == ", ".join(OPS[op].phases)
    assert re.findall(r"`(\w+)`", keys) == list(OPS[op].shape)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    setting = SETTINGS[name]
    _, values, default, meaning = row(name)
    assert default.strip("`") == str(next(item.default for item in fields(Execution) if item.name == name))
    expected = ", ".join(f"`{choice}`" for choice in setting.choices) or f"{setting.low} to {setting.high}"
    assert values == expected
    assert meaning.startswith(setting.help)


@pytest.mark.parametrize("key", [*TOP_KEYS, *MATCH_KEYS])
def test_keys_are_mentioned(key: str) -> None:
    assert f"`{key}`" in TEXT
