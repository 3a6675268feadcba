"""The policies that come with Lily: complete, and choosing what they should on both sides of every switch.

What a policy should choose is worked out here a second time, from the plain YAML, by a few lines that share nothing
with the engine's.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from lily.chips import CHIPS
from lily.ops import OPS
from lily.policy import Policy, Workload, auto_policy, available
from tests.variants import registry, shape_of

BOTH = registry("cpu", "metal")
SHIPPED = available(BOTH)
FOLDER = SHIPPED["cpu"].parent
CHIP_NAMES = {name for name in CHIPS if "-" not in name}
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}

load = cache(partial(Policy.load, registry=BOTH))


def plain(path: Path) -> dict[str, Any]:
    """A policy file merged with what it extends, as plain data."""
    document = yaml.safe_load(path.read_text("utf-8"))
    base = plain(FOLDER / document["extends"]) if "extends" in document else {}
    merged = {key: {**base.get(key, {}), **document.get(key, {})} for key in ("match", "execution", "kernels")}
    return {**document, **merged}


def holds(condition: Any, value: int | str) -> bool:
    if isinstance(condition, list):
        return value in condition
    if isinstance(condition, str) and (match := re.fullmatch(r"([<>]=?) (\d+)", condition)):
        return bool(COMPARE[match[1]](value, int(match[2])))
    return bool(condition == value)


def expected(rules: list[dict[str, Any]], phase: str, shape: dict[str, int]) -> dict[str, Any]:
    given: dict[str, int | str] = {"phase": phase, **shape}
    return next(rule for rule in rules if all(holds(c, given[key]) for key, c in rule.get("when", {}).items()))


def numbers(rules: list[dict[str, Any]], key: str) -> set[int]:
    """Every value near a threshold of the rules, and some far from all."""
    found = {1, 4096}
    for rule in rules:
        text = str(rule.get("when", {}).get(key, ""))
        found |= {int(number) + step for number in re.findall(r"\d+", text) for step in (-1, 0, 1)}
    return found


def workloads(op: str, rules: list[dict[str, Any]]) -> Iterator[Workload]:
    keys = [key for key in OPS[op].shape if any(key in rule.get("when", {}) for rule in rules)]
    for phase in OPS[op].phases:
        for point in product(*(sorted(numbers(rules, key)) for key in keys)):
            yield Workload(op, phase, shape_of(op, **dict(zip(keys, point, strict=True))))


def test_there_is_one_for_the_cpu_and_for_every_chip() -> None:
    assert set(SHIPPED) == {"cpu", "apple"} | CHIP_NAMES


@pytest.mark.parametrize("name", SHIPPED)
def test_complete_and_named_after_its_file(name: str) -> None:
    policy = load(name)
    assert policy.name == name
    assert policy.missing_variants(BOTH) == []
    assert policy.host == ("cpu" if name == "cpu" else "metal")
    assert policy.execution.kv_dtype == ("auto" if name == "cpu" else "bf16")
    assert policy.execution.token_handoff == "device"
    assert policy.execution.encoder == "concurrent"
    assert policy.execution.in_flight == 2


@pytest.mark.parametrize("name", SHIPPED)
def test_choices_on_both_sides_of_every_switch(name: str) -> None:
    policy = load(name)
    data = plain(SHIPPED[name])
    for op in OPS:
        rules = data["kernels"][op]
        met = []
        for work in workloads(op, rules):
            choice = policy.choose(work, policy.host, BOTH)
            rule = expected(rules, work.phase, dict(work.shape))
            assert choice.variant.name == rule["use"], work
            assert {**choice.options, **rule.get("with", {})} == choice.options, work
            met.append(choice.rule)
        assert {rule.source for rule in met} == {rule.source for rule in policy.rules(op)}, "every rule is reached"


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_every_chip_finds_its_policy(chip: Any) -> None:
    assert auto_policy(BOTH, chip.identity).name == chip.name.partition("-")[0]


def chosen(policy: str, op: str, phase: str, **shape: int) -> tuple[str, dict[str, object]]:
    loaded = load(policy)
    choice = loaded.choose(Workload(op, phase, shape_of(op, **shape)), loaded.host, BOTH)
    return choice.variant.name, dict(choice.options)


# The choices that figures are published for; 128 heads and groups of six are other models'.
@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "cpu"])
def test_choices_with_published_figures(name: str) -> None:
    form = "tensor" if name.startswith("m5") else "simdgroup"
    lanes = "contiguous" if name.startswith("m3") else "interleaved"
    real = {"head_dim": 256, "gqa_group": 8}
    packed = ("gqa_packed", {"heads": 4})
    assert chosen(name, "attention.decode", "decode", context=32767, **real) == packed
    assert chosen(name, "attention.decode", "decode", context=32768, **real) == ("fixed_block", {"blocks": 128})
    assert chosen(name, "attention.decode", "decode", context=65536, head_dim=128, gqa_group=8) == packed
    assert chosen(name, "attention.decode", "decode", context=65536, head_dim=256, gqa_group=4) == packed
    assert chosen(name, "attention.decode", "decode", context=65536, head_dim=256, gqa_group=6) == ("general", {})
    for op in ("moe.experts_in", "moe.experts_out"):
        assert chosen(name, op, "decode") == ("gemv_fused", {"lanes": lanes})
        few = {"form": form, "tile_rows": 16, "simdgroups": 2}
        many = {"form": form, "tile_rows": 32, "simdgroups": 4}
        assert chosen(name, op, "prefill", rows_per_expert=47) == ("grouped", few)
        assert chosen(name, op, "prefill", rows_per_expert=48) == ("grouped", many)
    assert chosen(name, "deltanet.scan", "prefill", rows=2048) == ("direct", {})
    assert chosen(name, "deltanet.step", "decode") == ("fused", {})
    assert chosen(name, "attention.prepare", "decode") == ("fused", {})
    assert chosen(name, "moe.route", "prefill") == ("fused", {})
    assert chosen(name, "moe.group", "prefill") == ("device", {})
    assert chosen(name, "linear", "prefill", rows=512) == ("gemm", {"form": form})
    assert chosen(name, "linear", "decode", rows=1) == ("gemv", {"lanes": lanes})


def test_both_expert_ops_share_one_tile() -> None:
    # moe.experts_out walks the block list that moe.group made for the tile of moe.experts_in.
    for name in SHIPPED:
        for rows_per_expert in (0, 47, 48, 4096):
            tiles = [
                chosen(name, op, "prefill", rows_per_expert=rows_per_expert)[1]["tile_rows"]
                for op in ("moe.experts_in", "moe.experts_out")
            ]
            assert tiles[0] == tiles[1]
