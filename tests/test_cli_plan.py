"""``lily plan`` as a command: what it prints, in which form, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lily.plan import SlotKind
from tests.commands import Result, lily, using
from tests.recording import recording_registry

BIG = "qwen3.6-35b-a3b"
REGISTRY = recording_registry("cpu", "metal", hosts=("cpu",))


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with using(REGISTRY):
        yield


def plan(*args: str) -> Any:
    result = lily("plan", *args, "--json")
    assert (result.code, result.err) == (0, "")
    return result.json


def refused(*args: str) -> str:
    result = lily("plan", *args)
    assert result.code in (1, 2)
    assert result.out == ""
    (line,) = result.err.splitlines()
    return line


def test_json_has_the_documented_keys() -> None:
    found = plan(BIG, "--context", "32768")
    assert set(found) == {
        *("model", "policy", "host", "phase", "rows", "context", "activation_dtype", "kv_dtype"),
        *("chip", "ops", "totals", "notes"),
    }
    kinds = ("weight", "state", "kv", "scratch", "control")
    traffic = {f"{kind}{part}_bytes" for kind in kinds for part in ("", "_read", "_written")}
    assert set(found["totals"]) == traffic | {
        *("dispatches", "stages", "host_calls", "recurrent_state_bytes", "convolution_state_bytes", "streamed_bytes"),
        *("scratch_allocated_bytes", "checkpoint_bytes", "floor_s", "ceiling_tok_s"),
    }
    assert all(type(value) in (int, float) for value in found["totals"].values())
    assert set(found["ops"][0]) == traffic | {
        *("label", "count", "layers", "op", "variant", "options", "rule", "dispatches", "stages", "host_calls"),
    }
    assert (found["model"], found["host"], found["phase"]) == (BIG, "cpu", "decode")
    assert (found["rows"], found["context"]) == (1, 32_768)


def test_json_totals_are_sums_of_ops() -> None:
    found = plan(BIG, "--phase", "prefill", "--rows", "100")
    for key in ("dispatches", "stages", "host_calls", "weight_bytes", "kv_read_bytes", "scratch_written_bytes"):
        assert found["totals"][key] == sum(op[key] for op in found["ops"])
    totals = found["totals"]
    for kind in ("weight", "state", "kv", "scratch", "control"):
        assert totals[f"{kind}_bytes"] == totals[f"{kind}_read_bytes"] + totals[f"{kind}_written_bytes"]
    assert totals["streamed_bytes"] == totals["weight_bytes"] + totals["state_bytes"] + totals["kv_bytes"]
    assert totals["state_bytes"] == totals["recurrent_state_bytes"] + totals["convolution_state_bytes"]


def test_the_chip_sets_the_floor() -> None:
    fast, slow = plan(BIG), plan(BIG, "--chip", "M1")
    assert fast["chip"] == {"name": "m5max", "title": "M5 Max, 40 GPU cores", "bandwidth_gb_s": 614}
    assert slow["totals"]["floor_s"] == pytest.approx(slow["totals"]["streamed_bytes"] / 68e9)
    assert slow["totals"]["floor_s"] / fast["totals"]["floor_s"] == pytest.approx(614 / 68)


def test_a_policy_for_another_host_is_planned_with_its_dtypes() -> None:
    found = plan(BIG, "--policy", "m5max", "--phase", "prefill")
    assert (found["host"], found["activation_dtype"], found["kv_dtype"], found["rows"]) == (
        "metal",
        "bf16",
        "bf16",
        2048,
    )
    experts = next(op for op in found["ops"] if op["op"] == "moe.experts_in")
    assert experts["options"] == {"form": "tensor", "tile_rows": 32, "simdgroups": 4}
    assert experts["rule"].startswith("m5.yaml:")


def test_a_model_on_disk_needs_no_weights(tmp_path: Path) -> None:
    from lily.catalog import find_model

    (tmp_path / "config.json").write_bytes((find_model(BIG).path / "config.json").read_bytes())
    assert plan(str(tmp_path))["totals"]["checkpoint_bytes"] == 19_508_789_376


def table(result: Result) -> list[str]:
    """The lines of the table of ops."""
    start = next(i for i, line in enumerate(result.lines) if line.startswith("where"))
    stop = next(i for i, line in enumerate(result.lines) if line.startswith("total"))
    return result.lines[start : stop + 1]


def test_the_table_names_op_variant_options_and_rule() -> None:
    result = lily("plan", BIG)
    lines = table(result)
    attention = next(line.split() for line in lines if line.startswith("self_attn.decode ×10"))
    assert attention[2:4] == ["attention.decode", "gqa_packed"]
    assert attention[4] == "heads=4"
    assert attention[5].startswith("cpu.yaml:")
    assert attention[6:8] == ["10", "10"]
    assert len({line.index("cpu.yaml") for line in lines if "cpu.yaml" in line}) == 1
    text = "\n".join(result.lines)
    assert "19,508,789,376 B (19.5 GB)" in text
    assert "at most 325 tok/s" in text
    for kind in SlotKind:
        assert kind.value in text.lower()


def test_prefill_gives_no_ceiling_because_arithmetic_bounds_it_first() -> None:
    assert "tok/s" not in lily("plan", BIG, "--phase", "prefill").out


def test_pipes_get_one_line_an_op_and_no_colour() -> None:
    result = lily("plan", BIG, "--policy", "m5max", environ={"COLUMNS": "40"})
    assert "\x1b" not in result.out
    assert len(table(result)) == 1 + 14 + 1


@pytest.mark.parametrize("columns", [80, 100, 120, 160])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("policy", ["cpu", "m5max"])
def test_terminals_are_not_overrun_and_nothing_is_lost(columns: int, phase: str, policy: str) -> None:
    result = lily("plan", BIG, "--policy", policy, "--phase", phase, columns=columns)
    assert "\x1b[1m" in result.out
    assert max(map(len, result.lines)) <= columns
    text = "".join("".join(result.lines).split())
    for word in ("linear_attn.in_proj×30", "deltanet.prepare", "moe.experts_in", "attention." + phase, ".yaml:"):
        assert word in text


def test_no_color_is_respected() -> None:
    coloured = lily("plan", columns=100).out
    plain = lily("plan", columns=100, environ={"NO_COLOR": "1"}).out
    assert "\x1b[36m" in coloured
    assert "\x1b[36m" not in plain


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rows", "2"], "a decode step reads one token"),
        (["--context", "9000"], "demo was made for 8,192 tokens"),
        (["--chip", "m9max"], "unknown chip 'm9max'"),
        (["--policy", "m5maxx"], "did you mean 'm5max'?"),
        ([BIG + "x"], f"did you mean {BIG}?"),
    ],
)
def test_mistakes_are_one_sentence(args: list[str], words: str) -> None:
    line = refused(*args)
    assert line.startswith("lily: ")
    assert words in line


def test_a_policy_whose_kernels_are_not_here_says_what_would_work() -> None:
    with using(recording_registry("cpu")):
        line = refused("--policy", "m5max")
    assert "policy m5max needs embed/rows" in line
    assert "policies for host cpu work" in line


def test_help_has_an_example() -> None:
    assert "lily plan qwen3.6-35b-a3b" in lily("plan", "--help").out


def test_the_installed_command() -> None:
    command = [sys.executable, "-m", "lily", "plan", BIG]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    assert "linear_attn.in_proj ×30" in done.stdout
