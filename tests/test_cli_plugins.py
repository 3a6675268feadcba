"""``lily plugins`` as a command: what is listed, and that a wrong kernel does not pass the check."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lily.ops import Op
from lily.plan import Plan
from lily.registry import KernelVariant, Option, Registry, default_registry
from tests.commands import lily, using
from tests.recording import HostPlugin, recording_registry, recording_variants
from tests.variants import Plugin

STEP = "deltanet.step"


def built_in(op: str, name: str) -> KernelVariant:
    found = default_registry().variant(op, "cpu", name)
    assert found is not None
    return found


def with_plugin(*variants: KernelVariant, policies: tuple[Path, ...] = ()) -> Registry:
    """A registry that knows every variant of the shipped policies, and a third party's plugin."""
    registry = recording_registry("cpu")
    registry.register(Plugin(variants, policies), "third_party")
    return registry


def wrong(op: Op, plan: Plan, **options: object) -> None:
    """The fused step with another epsilon in its norm."""
    built_in(STEP, "fused").encode(replace(op, params={"eps": 0.1}), plan, **options)


def right_variant() -> KernelVariant:
    return replace(built_in(STEP, "fused"), name="mine")


def wrong_variant() -> KernelVariant:
    return KernelVariant(STEP, "wrong", "cpu", wrong, "another epsilon", accepts=built_in(STEP, "fused").accepts)


def crashing_variant() -> KernelVariant:
    def encode(op: Op, plan: Plan) -> None:
        raise ZeroDivisionError("a plugin's bug")

    return KernelVariant(STEP, "crashing", "cpu", encode, "raises")


# -- list ------------------------------------------------------------------------------------------------------------


def listed(registry: Registry, *args: str) -> Any:
    with using(registry):
        result = lily("plugins", "list", *args, "--json")
    assert (result.code, result.err) == (0, "")
    return result.json


def test_list_counts_what_each_plugin_provides(tmp_path: Path) -> None:
    policy = tmp_path / "fast.yaml"
    policy.write_text("version: 1\nextends: cpu\n")
    variant = KernelVariant("embed", "mine", "cpu", right_variant().encode, "a summary")
    registry = with_plugin(variant, policies=(policy,))
    registry.register(HostPlugin("npu"), "npu_plugin")
    by_name = {plugin["name"]: plugin for plugin in listed(registry)["plugins"]}
    assert by_name["third_party"] == {
        **{"name": "third_party", "distribution": None, "version": None},
        **{"variant_count": 1, "ops": ["embed"], "hosts": [], "policies": ["fast"]},
    }
    assert by_name["npu_plugin"]["hosts"] == ["npu"]
    assert by_name["recording_cpu"]["variant_count"] == len(recording_variants("cpu"))


def test_list_of_variants_gives_options_with_their_choices() -> None:
    option = Option(32, (16, 32), "rows of a tile")
    variant = KernelVariant(
        "linear", "mine", "cpu", right_variant().encode, "tiles", requirement="luck", options={"tile": option}
    )
    registry = with_plugin(variant)
    plugin = next(plugin for plugin in listed(registry, "--variants")["plugins"] if plugin["name"] == "third_party")
    assert plugin["variants"] == [
        {
            **{"op": "linear", "host": "cpu", "name": "mine", "summary": "tiles", "requirement": "luck"},
            "options": {"tile": {"default": 32, "choices": [16, 32], "help": "rows of a tile"}},
        }
    ]
    with using(registry):
        line = next(line for line in lily("plugins", "list", "--variants").lines if "luck" in line)
    assert line.split()[:4] == ["linear", "cpu", "mine", "tile=32|16"]
    assert line.endswith("tiles; needs luck")


def test_list_names_broken_plugins_with_the_reason() -> None:
    registry = with_plugin()
    registry.broken["bad"] = "plugin bad: ImportError: no such thing"
    assert listed(registry)["broken"] == registry.broken
    with using(registry):
        assert "left out: plugin bad: ImportError: no such thing" in lily("plugins", "list").lines


def test_list_knows_the_version_of_a_distribution() -> None:
    command = [sys.executable, "-m", "lily", "plugins", "list", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    first = json.loads(done.stdout)["plugins"][0]
    assert (first["name"], first["hosts"]) == ("lily_builtin", ["cpu"])
    assert first["variant_count"] >= len(first["ops"]) >= 1
    assert first["version"] in (None, _version())


def _version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lily")
    except PackageNotFoundError:
        return None


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("args", [["list"], ["list", "--variants"], ["check", "third_party"]])
def test_terminals_are_not_overrun(columns: int, args: list[str]) -> None:
    with using(with_plugin(right_variant(), wrong_variant())):
        result = lily("plugins", *args, columns=columns)
    assert "\x1b[1m" in result.out
    assert max(map(len, result.lines)) <= columns


# -- check -----------------------------------------------------------------------------------------------------------


def test_check_passes_a_right_kernel() -> None:
    with using(with_plugin(right_variant())):
        result = lily("plugins", "check", "third_party", "--json")
    assert (result.code, result.err) == (0, "")
    assert result.json["passed"] is True
    (found,) = result.json["variants"]
    assert (found["plugin"], found["op"], found["variant"], found["passed"]) == ("third_party", STEP, "mine", True)
    assert found["cases"] >= 6
    assert 0 <= found["worst_error"] <= 1
    assert found["worst_case"].startswith(STEP)
    assert found["failures"] == []


def test_check_fails_a_wrong_kernel_and_says_where() -> None:
    with using(with_plugin(right_variant(), wrong_variant())):
        result = lily("plugins", "check", "third_party", "--json")
        text = lily("plugins", "check", "third_party")
    assert (result.code, text.code) == (1, 1)
    assert result.json["passed"] is False
    right, bad = result.json["variants"]
    assert (right["passed"], bad["passed"]) == (True, False)
    assert bad["worst_error"] > 1
    assert len(bad["failures"]) == bad["cases"]
    assert bad["failures"][0]["case"].startswith(STEP)
    lines = text.lines
    assert any(line.startswith(f"{STEP} ") and line.endswith("ok") for line in lines)
    assert any(line.startswith(f"{STEP} ") and line.endswith("failed") for line in lines)
    assert f"{STEP}/wrong: {bad['cases']} cases failed" in lines


def test_check_survives_a_variant_that_raises() -> None:
    with using(with_plugin(crashing_variant(), right_variant())):
        result = lily("plugins", "check", "third_party", "--json")
    assert result.code == 1
    crashed, right = result.json["variants"]
    assert crashed["worst_error"] is None
    assert "ZeroDivisionError: a plugin's bug" in crashed["failures"][0]["message"]
    assert right["passed"] is True


def test_check_can_be_limited_to_an_op() -> None:
    embed = KernelVariant("embed", "mine", "cpu", crashing_variant().encode, "raises")
    with using(with_plugin(embed, right_variant())):
        result = lily("plugins", "check", "third_party", "--op", STEP, "--json")
    assert result.code == 0
    assert [found["op"] for found in result.json["variants"]] == [STEP]


def test_check_skips_what_cannot_run_here_and_says_so() -> None:
    metal = KernelVariant(STEP, "mine", "metal", crashing_variant().encode, "for another machine")
    with using(with_plugin(metal, right_variant())):
        found = lily("plugins", "check", "third_party", "--json")
        text = lily("plugins", "check", "third_party")
    by_host = {item["host"]: item for item in found.json["variants"]}
    assert found.code == 0
    assert (by_host["metal"]["passed"], by_host["metal"]["cases"]) == (None, 0)
    assert by_host["metal"]["skipped"].startswith("host metal needs an Apple silicon Mac")
    assert text.lines[-1].startswith("Skipped where host metal needs")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["third_part"], 2, "there is no plugin called 'third_part'; did you mean third_party?"),
        (["--op", "deltanet.stop"], 2, "there is no op called 'deltanet.stop'; did you mean deltanet.step?"),
        (["third_party", "--op", "embed"], 2, "plugin third_party provides no kernel variant of embed"),
        (["bad"], 1, "plugin bad: ImportError: no such thing; nothing of it can be checked"),
        (["metal_only"], 1, "nothing can be checked here: host metal needs an Apple silicon Mac"),
    ],
)
def test_check_refuses_in_one_sentence(args: list[str], code: int, message: str) -> None:
    registry = with_plugin(right_variant())
    registry.broken["bad"] = "plugin bad: ImportError: no such thing"
    registry.register(Plugin([KernelVariant(STEP, "mine", "metal", wrong, "elsewhere")]), "metal_only")
    with using(registry):
        result = lily("plugins", "check", *args)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith(f"lily: {message}")
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["list", "check"])
def test_help_has_an_example(name: str) -> None:
    assert f"lily plugins {name}" in lily("plugins", name, "--help").out
