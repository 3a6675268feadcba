"""A third party's plugin from end to end: built against an installed Lily, found, selected, shown, checked, right."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.environments import ROOT, Distributions, Environment

PLUGIN = ROOT / "plugins" / "lily_example"
CODE = [*PLUGIN.glob("*.py"), *PLUGIN.glob("lily_example/*.py"), *PLUGIN.glob("lily_example/*.cc")]
POLICY = """\
version: 1
name: lazy
extends: cpu
kernels:
  attention.decode:
    - {{use: lazy_rescale, with: {{slack: {slack}}}}}
"""
# Long enough for scores to pass the reference again and again, in a second page of the cache too.
PROMPT = ["-p", "Tell me a story about a fox and an owl.", "--temperature", "0", "--max-tokens", "120"]


@pytest.fixture(scope="module")
def environment(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("example")
    source = shutil.copytree(PLUGIN, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "*.so"))
    return Environment(folder / "venv", distributions.wheel, source)


def policy(environment: Environment, slack: int) -> str:
    path = environment.folder / f"lazy{slack}.yaml"
    path.write_text(POLICY.format(slack=slack))
    return path.name


def test_it_takes_less_than_100_lines() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in CODE)
    assert lines < 100
    assert f"in {lines} lines" in (PLUGIN / "README.md").read_text()


def test_it_is_found(environment: Environment) -> None:
    listed = environment.lily_json("plugins", "list", "--variants")
    assert listed["broken"] == {}
    (found,) = [plugin for plugin in listed["plugins"] if plugin["name"] == "lily_example"]
    assert (found["distribution"], found["version"]) == ("lily-example", "0.1.0")
    (variant,) = found["variants"]
    assert (variant["op"], variant["host"], variant["name"]) == ("attention.decode", "cpu", "lazy_rescale")


def test_a_plan_shows_where_a_policy_selects_it(environment: Environment) -> None:
    def attention(name: str) -> list[dict[str, Any]]:
        ops = environment.lily_json("plan", "--policy", name, "--context", "300")["ops"]
        return [op for op in ops if op["op"] == "attention.decode"]

    chosen = attention(policy(environment, 4))
    assert chosen
    for op in chosen:
        assert (op["variant"], op["options"]) == ("lazy_rescale", {"slack": 4})
        assert op["rule"].endswith("lazy4.yaml:6")
    assert "lazy_rescale" not in [op["variant"] for op in attention("cpu")]


def test_it_agrees_with_the_oracle(environment: Environment) -> None:
    report = environment.lily_json("plugins", "check", "lily_example")
    assert report["passed"]
    (variant,) = report["variants"]
    assert variant["cases"] >= 100
    assert 0 < variant["worst_error"] < 1


@pytest.mark.parametrize("slack", [0, 8])
def test_the_text_is_that_of_the_default_policy(environment: Environment, slack: int) -> None:
    expected = environment.lily_json("run", *PROMPT, "--policy", "cpu")
    story = environment.lily_json("run", *PROMPT, "--policy", policy(environment, slack))
    assert story["policy"] == "lazy"
    assert story["completion_tokens"] > 100
    assert story["token_ids"] == expected["token_ids"]


def test_an_option_it_does_not_have_is_a_mistake_in_the_policy(environment: Environment) -> None:
    done = environment.lily("policy", "check", policy(environment, 5))
    assert done.returncode == 2
    message = "lazy5.yaml:6: option slack of attention.decode/lazy_rescale must be 0 or 4 or 8, not 5"
    assert message in done.stdout + done.stderr


BROKEN = {
    "absent_import": (
        "import not_there\n",
        "ModuleNotFoundError: No module named 'not_there'",
    ),
    "malformed": (
        "from lily.registry import KernelVariant\n"
        "def lily_variants():\n"
        "    return [KernelVariant('attention.decoding', 'x', 'cpu', print, '')]\n",
        "variant 'x' is for op 'attention.decoding'",
    ),
    "taken": (
        "from lily.registry import KernelVariant\n"
        "def lily_variants():\n"
        "    return [KernelVariant('attention.decode', 'general', 'cpu', print, '')]\n",
        "variant attention.decode/cpu/general is already provided by plugin lily_builtin",
    ),
}


@pytest.fixture(scope="module")
def broken(environment: Environment) -> Environment:
    """The environment with broken plugins beside the sound one."""
    for name, (code, _) in BROKEN.items():
        (environment.packages / f"{name}.py").write_text(code)
        metadata: Path = environment.packages / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[lily]\n{name} = {name}\n")
    return environment


def test_broken_plugins_are_named_in_one_line_each_and_the_rest_keeps_working(broken: Environment) -> None:
    listed = broken.lily_json("plugins", "list")
    assert set(listed["broken"]) == set(BROKEN)
    for name, (_, reason) in BROKEN.items():
        assert listed["broken"][name].startswith(f"plugin {name}: ")
        assert reason in listed["broken"][name]
        assert "\n" not in listed["broken"][name]
    assert {"lily_builtin", "lily_example"} == {plugin["name"] for plugin in listed["plugins"]}
    assert broken.lily_json("run", *PROMPT, "--policy", policy(broken, 8))["policy"] == "lazy"


@pytest.mark.parametrize("name", BROKEN)
def test_checking_a_broken_plugin_says_why_it_cannot_be(broken: Environment, name: str) -> None:
    done = broken.lily("plugins", "check", name)
    assert done.returncode != 0
    assert BROKEN[name][1] in done.stderr
    assert "Traceback" not in done.stderr
