"""docs/cli.md keeps up with the commands: every one of them, every option, every key of their JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from lily.cli import cli
from tests.commands import lily, using
from tests.recording import recording_registry

DOC = (Path(__file__).parent.parent / "docs" / "cli.md").read_text("utf-8")


def commands(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not isinstance(group, click.Group):
        yield path
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield from commands(found, (*path, name))


def section(path: tuple[str, ...]) -> str:
    title = re.escape("`lily " + " ".join(path) + "`")
    found = re.search(rf"^##+ {title}$(.*?)(?=^##+ `|\Z)", DOC, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/cli.md has no section on lily {' '.join(path)}"
    return found[1]


@pytest.mark.parametrize("path", list(commands(cli)), ids=" ".join)
def test_every_option_is_described(path: tuple[str, ...]) -> None:
    text = section(path)
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert re.search(rf"{re.escape(option)}\b", text), f"{option} is not described"


def keys_of(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        (("plan",), ["qwen3.6-35b-a3b"]),
        (("policy", "list"), []),
        (("policy", "check"), ["cpu"]),
        (("policy", "explain"), ["cpu", "--op", "embed", "--phase", "decode"]),
        (("policy", "diff"), ["m1", "m2"]),
        (("plugins", "list"), []),
        (("doctor",), []),
    ],
)
def test_every_key_is_described(path: tuple[str, ...], rest: list[str]) -> None:
    with using(recording_registry("cpu")):
        found = lily(*path, *rest, "--json").json
    text = section(path)
    # What stands below these keys has names of its own: options of variants, settings, conditions.
    for free in ("options", "match", "shape", "when", "with"):
        text += f" `{free}` "
    inner = {"heads", "blocks", "tile_rows", "host", "generation", "suffix", "gpu_cores", "rows"}
    for key in sorted(set(keys_of(found)) - inner):
        kind = re.sub(r"^(weight|state|kv|scratch|control)_(read|written)_", r"weight_\2_", key)
        assert f"`{kind}`" in text, f"key {key} is not described"
