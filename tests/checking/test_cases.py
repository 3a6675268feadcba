"""The tables, and the cases that a policy's switches add."""

from __future__ import annotations

from pathlib import Path

import pytest

from lily.checking.case import Case, shape_of
from lily.checking.cases import cases_for, thresholds
from lily.ops import OPS
from lily.policy import Policy
from lily.registry import Registry

POLICY = """
version: 1
name: probe
extends: cpu.yaml
kernels:
  linear:
    - {when: {rows: "< 23"}, use: gemv}
    - {use: gemm}
  attention.decode:
    - {when: {context: ">= 777", gqa_group: [6]}, use: fixed_block}
    - {use: general}
  moe.experts_in:
    - {when: {phase: decode}, use: gemv_fused}
    - {when: {rows_per_expert: "12..19"}, use: grouped}
    - {use: grouped}
"""


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    file = tmp_path / "probe.yaml"
    file.write_text(POLICY)
    return Policy.load(file, Registry())


def shapes(op: str, key: str, *policies: Policy) -> set[int]:
    return {shape_of(case)[key] for case in cases_for(op, policies)}


@pytest.mark.parametrize(
    ("op", "key", "edges"),
    [
        ("linear", "rows", [23]),
        ("attention.decode", "context", [777]),
        ("attention.decode", "gqa_group", [6, 7]),
        ("moe.experts_in", "rows_per_expert", [12, 20]),
    ],
)
def test_both_sides_of_a_switch_are_added(policy: Policy, op: str, key: str, edges: list[int]) -> None:
    assert thresholds([policy], op)[key] == edges
    sides = {side for edge in edges for side in (edge - 1, edge)}
    assert not sides <= shapes(op, key)
    assert sides <= shapes(op, key, policy)


@pytest.mark.parametrize("op", OPS)
def test_every_phase_of_an_op_has_cases(op: str) -> None:
    assert {case.phase for case in cases_for(op)} == set(OPS[op].phases)


def test_the_shape_of_a_linear_counts_its_parts() -> None:
    dims = {"rows": 4, "in_features": 256, "out0": 96, "out1": 33, "out2": 4}
    shape = shape_of(Case("linear", "prefill", dims))
    assert shape == {"rows": 4, "in_features": 256, "out_features": 133, "bits": 4, "parts": 3}


def test_the_shapes_of_both_models_are_there() -> None:
    """Per-layer shapes of the bundled model and of Qwen3.6-35B-A3B (model_spec §1)."""
    assert {256, 2048} <= shapes("linear", "in_features")
    assert {1024 + 512 + 4 + 4, 8192 + 4096 + 32 + 32, 8192 + 512 + 512} <= shapes("linear", "out_features")
    assert {4, 32} <= shapes("deltanet.step", "value_heads")
    assert {8, 16} <= shapes("attention.decode", "heads")
    assert {32, 256} <= shapes("moe.experts_in", "experts")
    assert {64, 512} <= shapes("moe.experts_out", "expert_width")
    assert 248_320 in shapes("sample", "vocab")
