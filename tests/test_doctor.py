"""``lily doctor``: a reason for each no, and an exit code that says whether anything works."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import lily as lily_package
from lily.catalog import find_model
from lily.config import load_config
from lily.doctor import diagnose
from lily.machine import Machine, Memory
from lily.registry import HostFactory, Registry
from tests.commands import lily, using
from tests.recording import HostPlugin, recording_registry

GB = 10**9


def machine(available: int | None) -> Machine:
    return Machine("Linux 6.1", "x86_64", "some processor", "3.11.0", 8, Memory(32 * GB, available))


def doctor(registry: Registry, *args: str, **environ: str) -> tuple[int, Any]:
    with using(registry):
        result = lily("doctor", *args, "--json", environ=environ)
    assert result.err == ""
    return result.code, result.json


def hosts(found: Any) -> dict[str, Any]:
    return {host["name"]: host for host in found["hosts"]}


def test_every_host_is_usable_or_has_a_reason() -> None:
    code, found = doctor(recording_registry("cpu"), "demo")
    assert code == 0
    assert (found["works"], found["policy"], found["policy_error"]) == (True, "cpu", None)
    by_name = hosts(found)
    assert by_name["cpu"] == {"name": "cpu", "usable": True, "summary": "a cpu", "reason": None}
    assert by_name["metal"]["usable"] is False
    assert by_name["metal"]["reason"].startswith("an Apple silicon Mac")


def test_instruction_sets_say_which_run_and_which_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LILY_CPU_ISA", raising=False)
    _, found = doctor(recording_registry("cpu"), "demo")
    sets = found["instruction_sets"]
    assert sum(item["chosen"] for item in sets) == 1
    assert all(item["runs_here"] for item in sets if item["chosen"])
    assert {"name": "portable", "runs_here": True} in [{k: item[k] for k in ("name", "runs_here")} for item in sets]
    _, asked = doctor(recording_registry("cpu"), "demo", LILY_CPU_ISA="portable")
    assert [item["name"] for item in asked["instruction_sets"] if item["chosen"]] == ["portable"]


def test_a_wrong_instruction_set_is_the_reason() -> None:
    code, found = doctor(recording_registry("cpu"), "demo", LILY_CPU_ISA="sse9")
    assert (code, found["works"]) == (1, False)
    assert "LILY_CPU_ISA is 'sse9'" in hosts(found)["cpu"]["reason"]


def test_a_missing_compiled_part_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lily._cpu", None)
    monkeypatch.delattr(lily_package, "_cpu", raising=False)
    code, found = doctor(recording_registry("cpu"), "demo")
    assert code == 1
    assert found["instruction_sets"] == []
    assert "install Lily again" in hosts(found)["cpu"]["reason"]


def test_no_host_at_all() -> None:
    with using(recording_registry("cpu", hosts=())):
        result = lily("doctor")
    assert result.code == 1
    assert result.lines[-1] == "No host works here, so nothing can be run."
    assert any("no policy" in line for line in result.lines)


def test_hosts_of_plugins_are_probed_too() -> None:
    registry = recording_registry("cpu")
    registry.register(HostPlugin("npu", reasons={"npu": "an NPU"}), "npu_plugin")

    def broken() -> str | None:
        raise RuntimeError("no driver")

    class Broken:
        def lily_hosts(self) -> list[HostFactory]:
            return [HostFactory("tpu", "a tpu", "f32", broken, lambda: {"host": "tpu"}, lambda execution, paths: None)]  # type: ignore[arg-type, return-value]

    registry.register(Broken(), "tpu_plugin")
    code, found = doctor(registry, "demo")
    assert code == 0
    assert hosts(found)["npu"]["reason"] == "an NPU"
    assert hosts(found)["tpu"]["reason"] == "a probe that works: RuntimeError: no driver"


def test_broken_plugins_are_named() -> None:
    registry = recording_registry("cpu")
    registry.broken["bad"] = "plugin bad: ImportError: no such thing"
    code, found = doctor(registry, "demo")
    assert (code, found["broken_plugins"]) == (0, registry.broken)
    with using(registry):
        assert "left out: plugin bad: ImportError: no such thing" in lily("doctor").out


@pytest.mark.parametrize(
    ("available", "verdicts", "largest"),
    [(64 * GB, ["yes", "yes"], 262_144), (22 * GB, ["yes", "no"], None), (4 * GB, ["slow", "no"], 0)],
)
def test_the_35b_model_in_machines_of_several_sizes(available: int, verdicts: list[str], largest: int | None) -> None:
    registry = recording_registry("cpu")
    config = load_config(find_model("qwen3.6-35b-a3b").path)
    (model,) = diagnose(registry, [("big", config)], machine(available)).models
    assert [fit.context for fit in model.fits] == [4096, 262_144]
    assert [fit.verdict for fit in model.fits] == verdicts
    assert all(fit.reason for fit in model.fits)
    if largest is None:
        assert model.largest_context is not None
        assert 4096 < model.largest_context < 262_144
    else:
        assert model.largest_context == largest


def test_json_of_a_model_has_the_documented_keys() -> None:
    _, found = doctor(recording_registry("cpu"), "qwen3.6-35b-a3b")
    assert set(found) == {
        *("works", "lily", "python", "system", "architecture", "processor", "cores"),
        *("memory_total_bytes", "memory_available_bytes", "memory_limited"),
        *("hosts", "instruction_sets", "policy", "policy_error", "plugins", "broken_plugins", "models"),
    }
    (model,) = found["models"]
    assert set(model) == {
        *("name", "error", "max_context", "checkpoint_bytes", "state_bytes", "scratch_bytes"),
        *("largest_context", "fits"),
    }
    assert set(model["fits"][0]) == {"context", "kv_bytes", "needed_bytes", "verdict", "reason"}


def test_a_model_that_cannot_be_run_says_why() -> None:
    registry = recording_registry("cpu", hosts=())
    config = load_config(find_model("demo").path)
    (model,) = diagnose(registry, [("demo", config)], machine(GB)).models
    assert (model.size, model.fits, model.error) == (None, (), "there is no policy to run it under")


@pytest.mark.parametrize("columns", [80, 120])
def test_terminals_are_not_overrun(columns: int) -> None:
    with using(recording_registry("cpu")):
        result = lily("doctor", columns=columns)
    assert "\x1b[32myes" in result.out
    assert max(map(len, result.lines)) <= columns


def test_an_unknown_model_is_one_sentence() -> None:
    with using(recording_registry("cpu")):
        result = lily("doctor", "nosuch")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith('lily: no model "nosuch"')


def test_help_has_an_example() -> None:
    assert "lily doctor qwen3.6-35b-a3b --json" in lily("doctor", "--help").out


def test_the_installed_command() -> None:
    command = [sys.executable, "-m", "lily", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    assert found["works"]
    assert next(plugin["name"] for plugin in found["plugins"]) == "lily_builtin"
    assert [model["name"] for model in found["models"]] == ["demo", "qwen3.6-35b-a3b"]
    assert all(model["error"] is None for model in found["models"])
