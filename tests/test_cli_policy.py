"""``lily policy`` as a command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lily.policy import Policy
from tests.commands import lily, using
from tests.recording import recording_registry
from tests.variants import Plugin

REGISTRY = recording_registry("cpu", hosts=("cpu",))


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with using(REGISTRY):
        yield


def policy(*args: str) -> Any:
    result = lily("policy", *args, "--json")
    assert (result.code, result.err) == (0, "")
    return result.json


def write(folder: Path, kernels: str, name: str = "mine") -> str:
    file = folder / f"{name}.yaml"
    file.write_text(f"version: 1\nextends: cpu\nkernels:\n{kernels}")
    return str(file)


# -- list ------------------------------------------------------------------------------------------------------------


def test_list_says_what_can_be_used_and_why_not() -> None:
    found = policy("list")
    assert found["auto"] == "cpu"
    by_name = {item["name"]: item for item in found["policies"]}
    assert by_name["cpu"]["usable"] is True
    assert by_name["cpu"]["reason"] is None
    m5max = by_name["m5max"]
    assert (m5max["usable"], m5max["plugin"], m5max["host"]) == (False, "lily", "metal")
    assert m5max["reason"].startswith("host metal needs an Apple silicon Mac")
    assert m5max["match"] == {"host": "metal", "generation": 17, "suffix": "s", "gpu_cores": ">= 24"}
    assert {"op": "embed", "variant": "rows", "source": "apple.yaml:24"} in m5max["missing_variants"]


def test_list_for_people() -> None:
    result = lily("policy", "list")
    m5max = next(line for line in result.lines if line.startswith("m5max "))
    assert m5max.split(maxsplit=2)[:2] == ["m5max", "metal"]
    assert "generation 17, suffix s, gpu_cores >= 24" in m5max
    assert m5max.endswith("no")
    assert sum("needs an Apple silicon Mac" in line for line in result.lines) == 1
    assert result.lines[-1] == "--policy auto takes cpu here."


def test_list_names_the_plugin_and_the_mistakes_of_a_policy(tmp_path: Path) -> None:
    good = write(tmp_path, "  embed:\n    - {use: rows}\n", "good")
    bad = write(tmp_path, "  embed:\n    - {use: rowz}\n    - {use: rows}\n", "bad")
    registry = recording_registry("cpu")
    registry.register(Plugin(policies=[Path(good), Path(bad)]), "third_party")
    with using(registry):
        by_name = {item["name"]: item for item in policy("list")["policies"]}
    assert (by_name["good"]["plugin"], by_name["good"]["usable"]) == ("third_party", True)
    assert (by_name["bad"]["usable"], by_name["bad"]["host"]) == (False, None)
    assert by_name["bad"]["reason"].startswith("it has 2 mistakes, first bad.yaml:5: ")


def test_list_without_any_host() -> None:
    with using(recording_registry("cpu", hosts=())):
        result = lily("policy", "list")
    assert result.code == 0
    assert result.lines[-1] == "No policy matches this machine."


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("args", [["list"], ["diff", "m1", "m5max"], ["check", "m5max"]])
def test_terminals_are_not_overrun(columns: int, args: list[str]) -> None:
    assert max(map(len, lily("policy", *args, columns=columns).lines)) <= columns


# -- show ------------------------------------------------------------------------------------------------------------


def test_show_is_a_policy_that_means_the_same(tmp_path: Path) -> None:
    file = tmp_path / "m5max.yaml"
    file.write_text(lily("policy", "show", "m5max").out)
    assert policy("diff", "m5max", str(file))["differences"] == []
    assert "extends" not in yaml.safe_load(file.read_text())


def test_show_says_where_each_line_comes_from() -> None:
    lines = lily("policy", "show", "m5max").lines
    assert any(line.startswith("  generation: 17  # m5max.yaml:") for line in lines)
    assert any(line.startswith("  prefill_chunk: 2048  # apple.yaml:") for line in lines)


def test_show_on_a_terminal_can_be_copied(tmp_path: Path) -> None:
    shown = lily("policy", "show", "m5max", columns=40)
    assert "\x1b[2m" in shown.out
    file = tmp_path / "copied.yaml"
    file.write_text("\n".join(shown.lines) + "\n")
    assert Policy.load(file, REGISTRY).name == "m5max"


def test_show_as_json() -> None:
    found = policy("show", "m5max")
    assert (found["name"], found["host"], found["extends"]) == ("m5max", "metal", ["m5.yaml", "apple.yaml"])
    assert found["execution"]["prefill_chunk"] == 2048
    first = found["kernels"]["attention.decode"][0]
    assert first["when"] == {"context": ">= 32768", "head_dim": 256, "gqa_group": 8}
    assert (first["use"], first["with"]) == ("fixed_block", {"blocks": 128})
    assert first["source"].startswith("apple.yaml:")


# -- check -----------------------------------------------------------------------------------------------------------


def test_check_passes_with_the_number_of_rules() -> None:
    result = lily("policy", "check", "cpu")
    rules = sum(map(len, Policy.load("cpu", REGISTRY).kernels.values()))
    assert (result.code, result.lines) == (0, [f"cpu: ok, {rules} rules"])


def test_check_reports_every_mistake_of_every_file(tmp_path: Path) -> None:
    bad = write(tmp_path, "  linear:\n    - {use: gemvv}\n  lineer:\n    - {use: gemv}\n")
    result = lily("policy", "check", bad, "cpu", "nosuch")
    assert result.code == 2
    assert f"{bad}:5: unknown variant 'gemvv' of linear on host cpu; did you mean 'gemv'?" in result.lines
    assert f"{bad}:6: unknown op 'lineer' in kernels; did you mean 'linear'?" in result.lines
    assert any(line.startswith("cpu: ok") for line in result.lines)
    assert any("unknown policy 'nosuch'" in line for line in result.lines)


def test_check_says_which_variants_are_missing_here() -> None:
    result = lily("policy", "check", "m5max", "--json")
    assert (result.code, result.err) == (1, "")
    (file,) = result.json["files"]
    assert (file["file"], file["name"], file["host"], file["mistakes"]) == ("m5max", "m5max", "metal", [])
    assert len(file["missing"]) == file["rules"]
    text = lily("policy", "check", "m5max").out
    assert "apple.yaml:24: no plugin here provides variant rows of embed for host metal" in text


def test_mistakes_weigh_more_than_missing_variants(tmp_path: Path) -> None:
    bad = write(tmp_path, "  embed: []\n")
    assert lily("policy", "check", "m5max", bad).code == 2


# -- explain ---------------------------------------------------------------------------------------------------------


def outcomes(*args: str) -> list[str]:
    return [rule["outcome"] for rule in policy("explain", *args)["rules"]]


def test_explain_says_which_rule_wins_and_why_not_the_others() -> None:
    found = policy(
        "explain", "cpu", "--op", "attention.decode", "--shape", "context=100", "head_dim=256", "gqa_group=8"
    )
    assert [rule["outcome"] for rule in found["rules"]] == ["no", "chosen", "after"]
    assert found["rules"][0]["reasons"] == ["context is 100, not >= 32768"]
    assert found["shape"] == {"rows": 1, "context": 100, "head_dim": 256, "gqa_group": 8}
    assert (found["phase"], found["variant_available"]) == ("decode", True)


@pytest.mark.parametrize(("context", "first"), [(32_767, "no"), (32_768, "chosen")])
def test_explain_on_both_sides_of_a_switch(context: int, first: str) -> None:
    shape = ["--shape", f"context={context}", "--shape", "head_dim=256", "--shape", "gqa_group=8"]
    assert outcomes("cpu", "--op", "attention.decode", *shape)[0] == first


def test_explain_asks_only_for_keys_that_decide() -> None:
    assert outcomes("cpu", "--op", "moe.experts_in", "--phase", "decode")[0] == "chosen"
    result = lily("policy", "explain", "cpu", "--op", "moe.experts_in", "--phase", "prefill")
    assert (result.code, result.out) == (2, "")
    assert "also ask for rows_per_expert; add --shape rows_per_expert=N" in result.err


def test_explain_for_people_says_that_a_variant_is_missing() -> None:
    result = lily("policy", "explain", "m5max", "--op", "embed", "--phase", "decode")
    assert result.code == 0
    assert result.lines[-1] == "No plugin here provides variant rows of embed for host metal."
    assert any(line.startswith("apple.yaml:24") and line.endswith("chosen") for line in result.lines)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--op", "attention.decod"], "unknown op 'attention.decod'; did you mean 'attention.decode'?"),
        (["--op", "linear", "--phase", "decoding"], "unknown phase 'decoding' of linear; did you mean 'decode'?"),
        (["--op", "linear"], "linear has rules for both phases; say --phase prefill or --phase decode"),
        (["--op", "sample", "--phase", "decode", "--shape", "vocabs=1"], "did you mean 'vocab'?"),
        (["--op", "sample", "--phase", "decode", "--shape", "vocab"], "--shape takes KEY=VALUE with a whole number"),
        (["--op", "sample", "--phase", "decode", "--shape", "vocab=-1"], "not 'vocab=-1'"),
    ],
)
def test_explain_refuses_what_it_does_not_know(args: list[str], message: str) -> None:
    result = lily("policy", "explain", "cpu", *args)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert len(result.err.splitlines()) == 1


# -- diff ------------------------------------------------------------------------------------------------------------


def test_diff_shows_what_is_done_differently(tmp_path: Path) -> None:
    other = write(tmp_path, "  deltanet.step:\n    - {use: split}\n")
    (difference,) = policy("diff", "cpu", other)["differences"]
    assert difference == {"what": "kernels.deltanet.step", "left": ["{use: fused}"], "right": ["{use: split}"]}
    lines = lily("policy", "diff", "cpu", other).lines
    assert lines[-3:] == ["kernels.deltanet.step", "  - {use: fused}", "  + {use: split}"]


def test_diff_of_equals() -> None:
    assert lily("policy", "diff", "cpu", "cpu").lines == ["cpu and cpu do the same."]


def test_diff_shows_common_rules_once() -> None:
    lines = [line.strip() for line in lily("policy", "diff", "m1", "m5max").lines]
    rule = "{when: {phase: decode}, use: gemv, with: {lanes: interleaved}}"
    assert lines.count(rule) == 1
    assert f"- {rule}" not in lines


# -- all -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["list", "show", "check", "explain", "diff"])
def test_help_has_an_example(name: str) -> None:
    assert f"lily policy {name}" in lily("policy", name, "--help").out


def test_the_installed_command() -> None:
    command = [sys.executable, "-m", "lily", "policy", "check", "cpu", "m1", "m5max"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    assert "cpu: ok" in done.stdout
    assert done.returncode == (0 if "missing" not in done.stdout else 1)
