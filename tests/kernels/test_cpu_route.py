"""CPU kernels of expert routing against the float64 oracle, and device against host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lily_builtin.cpu_route import VARIANTS, choose_experts, group_rows

from lily.checking import Case, Harness
from lily.checking.weights import BF16, F16, F32, Q4, Q8, WeightFormat
from lily.hosts.cpu import CpuHost
from lily.ops import Operand, Weight
from lily.plan import HostCall
from lily.reference import group
from lily.registry import KernelVariant, Registry
from tests.kernels.workbench import ISAS, Workbench, named

EPS = 1e-6
DEMO = {"experts": 32, "top_k": 4, "hidden": 256, "expert_width": 64, "shared_width": 64}
REAL = {"experts": 256, "top_k": 8, "hidden": 2048, "expert_width": 512, "shared_width": 512}
ODD = {"experts": 21, "top_k": 3, "hidden": 192, "expert_width": 64, "shared_width": 64}
ROWS = (1, 2, 7, 8, 9, 63, 64, 65, 130)
FORMATS = (Q4, Q8, WeightFormat("q8", 32), BF16, F16, F32)

ROUTES = ("fused", "split", "host_routed")
GROUPS = ("device", "host_routed")


def cases(op: str) -> list[Case]:
    if op == "moe.group":
        table = [Case(op, "prefill", {"rows": rows, **DEMO, "tile_rows": (16, 32)[rows % 2]}) for rows in ROWS]
        return [*table, Case(op, "prefill", {"rows": 300, **REAL, "tile_rows": 16})]
    table = [Case(op, "prefill", {"rows": rows, **DEMO}, (Q8,)) for rows in ROWS]
    # Gate and shared gate of different formats take different forms of the input.
    for fmt, other in zip(FORMATS, (*FORMATS[1:], FORMATS[0]), strict=True):
        table.append(Case(op, "decode", {"rows": 1, **ODD}, (fmt, other)))
        table.append(Case(op, "prefill", {"rows": 11, **ODD}, (fmt, other)))
    return [*table, Case(op, "decode", {"rows": 1, **REAL}, (Q8,)), Case(op, "prefill", {"rows": 9, **REAL}, (Q8,))]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.op}-{v.name}")
def test_variants_meet_the_oracle(variant: KernelVariant, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the harness's tolerances; threads, barriers and leftovers in memory change no bit."""
    monkeypatch.setenv("LILY_CPU_ISA", isa)
    harness = Harness(CpuHost(threads=2), Registry(), policies=[])
    results = harness.check_variant(variant, cases(variant.op))
    harness.close()
    assert not [str(result) for result in results if not result.passed]


@pytest.fixture(params=ISAS)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    monkeypatch.setenv("LILY_CPU_ISA", request.param)
    workbench = Workbench()
    yield workbench
    workbench.close()


def matrix(bench: Workbench, values: Any) -> Weight:
    """A float32 weight."""
    tensor = bench.tensor(values)
    rows, cols = tensor.shape
    nothing = tensor.view.part(0, 0)
    return Weight(rows, cols, 0, "f32", 0, tensor.view, nothing, nothing)


def route(bench: Workbench, name: str, gate: Any, x: Any, top_k: int) -> tuple[Any, Any]:
    """ids and weights for rows ``x`` and a gate of float32 rows."""
    rows, hidden = np.shape(x)
    experts = len(gate)
    ids, weights = bench.tensor(np.full((rows, top_k), -1), "i32"), bench.empty(rows, top_k + 1)
    operands: dict[str, Operand] = {
        "x": bench.tensor(x),
        "norm": bench.tensor(np.ones(hidden)),
        "gate": matrix(bench, gate),
        "shared_gate": matrix(bench, np.zeros((1, hidden))),
        "h": bench.empty(rows, hidden),
        "ids": ids,
        "weights": weights,
    }
    shape = {"rows": rows, "experts": experts, "top_k": top_k, "hidden": hidden, "expert_width": 64}
    shape["rows_per_expert"] = rows * top_k // experts
    bench.run(named(VARIANTS, "moe.route", name), "prefill", shape, operands, {"eps": EPS})
    return bench.read(ids), bench.read(weights)


@pytest.mark.parametrize("name", ROUTES)
def test_ties_go_to_the_lowest_id(bench: Workbench, name: str) -> None:
    """Equal rows of the gate give equal scores to the bit, wherever they stand."""
    hidden, rng = 64, np.random.default_rng(0)
    base = rng.normal(size=(3, hidden))
    gate = base[[0, 1, 2] * 11]  # expert e scores like e % 3
    ids, weights = route(bench, name, gate, rng.normal(size=(20, hidden)), 14)
    for row, share in zip(ids, weights, strict=True):
        best = row[0]
        assert best < 3
        assert row[:11].tolist() == list(range(best, 33, 3))
        assert row[11:].tolist() == list(range(row[11], 9, 3))
        assert np.ptp(share[:11]) == 0
        np.testing.assert_allclose(share[:14].sum(), 1, rtol=0, atol=1e-6)
        assert share[14] == 0.5


@pytest.mark.parametrize("name", ROUTES)
def test_all_equal_scores_choose_the_first_experts(bench: Workbench, name: str) -> None:
    ids, weights = route(bench, name, np.zeros((40, 64)), np.ones((3, 64)), 8)
    assert (ids == np.arange(8)).all()
    assert (weights[:, :8] == 0.125).all()


@pytest.mark.parametrize("name", ROUTES)
def test_every_expert_may_be_chosen(bench: Workbench, name: str) -> None:
    """top_k of as many experts as there are, with scores far apart: a permutation, weights down to 0."""
    rng = np.random.default_rng(1)
    gate = rng.normal(size=(21, 64)) * 40
    ids, weights = route(bench, name, gate, rng.normal(size=(9, 64)), 21)
    assert (np.sort(ids, axis=1) == np.arange(21)).all()
    assert (np.diff(weights[:, :21], axis=1) <= 0).all()
    np.testing.assert_allclose(weights[:, :21].sum(axis=1), 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["fused", "split"])
def test_scores_that_are_no_numbers_still_choose_different_experts(bench: Workbench, name: str) -> None:
    """What follows may index by the ids, whatever the numbers are."""
    gate = np.random.default_rng(2).normal(size=(12, 64))
    gate[[1, 4]] = np.nan
    x = np.ones((2, 64))
    x[1] = np.nan
    ids, _ = route(bench, name, gate, x, 11)
    assert not {1, 4} & set(ids[0, :10].tolist())
    assert ids[1].tolist() == list(range(11))


def test_host_routing_pauses_and_device_routing_does_not() -> None:
    from lily.checking.operands import build
    from lily.checking.running import record

    for op, names in (("moe.route", ROUTES), ("moe.group", GROUPS)):
        for name in names:
            plan = record(named(VARIANTS, op, name), build(cases(op)[0]), {}).plan
            assert sum(isinstance(step, HostCall) for step in plan.steps) == (name == "host_routed")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_grouping_is_that_of_the_oracle(data: st.DataObject) -> None:
    """Any ids, experts without rows and one expert with all of them included; unused blocks have no rows."""
    experts, top_k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    tile_rows = data.draw(st.sampled_from([16, 32]))
    ids = np.array(data.draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=200)))
    ids = ids.repeat(top_k).reshape(-1, top_k)
    wanted = group(ids, experts, tile_rows)
    blocks = np.column_stack([wanted.block_expert, wanted.block_row, wanted.block_rows])
    spare = data.draw(st.integers(0, 3))
    bench = Workbench()
    for name in GROUPS:
        sizes = {"offsets": experts + 1, "order": ids.size, "inverse": ids.size, "blocks": 3 * (len(blocks) + spare)}
        out = {role: bench.tensor(np.full(size, -9), "i32") for role, size in sizes.items()}
        out["blocks"] = bench.tensor(np.full((len(blocks) + spare, 3), -9), "i32")
        shape = {"rows": len(ids), "experts": experts, "top_k": top_k, "hidden": 64, "expert_width": 64}
        shape["rows_per_expert"] = ids.size // experts
        operands = {"ids": bench.tensor(ids, "i32"), **out}
        bench.run(named(VARIANTS, "moe.group", name), "prefill", shape, operands, {"tile_rows": tile_rows})
        assert np.array_equal(bench.read(out["offsets"]), wanted.offsets)
        assert np.array_equal(bench.read(out["order"]), wanted.slots)
        assert np.array_equal(bench.read(out["inverse"]), wanted.rows)
        assert np.array_equal(bench.read(out["blocks"])[: len(blocks)], blocks)
        assert not bench.read(out["blocks"])[len(blocks) :].any()
    bench.close()


def test_host_side_choice_and_grouping_by_hand() -> None:
    ids, weights = choose_experts(np.array([[0.0, 2.0, 2.0, -1.0]], np.float32), 3)
    assert ids.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(weights, [[0.4683, 0.4683, 0.0634]], atol=1e-4)
    offsets, order, inverse, blocks = group_rows(np.array([2, 0, 2, 2], np.int32), 3, 2)
    assert offsets.tolist() == [0, 1, 1, 4]
    assert order.tolist() == [1, 0, 2, 3]
    assert inverse.tolist() == [1, 0, 2, 3]
    assert blocks.tolist() == [0, 0, 1, 2, 1, 2, 2, 3, 1]


def test_more_experts_a_token_than_the_kernel_can_choose_are_refused() -> None:
    from tests.variants import make_op

    for variant in VARIANTS:
        if variant.op == "moe.route" and variant.name != "host_routed":
            assert variant.accepts(make_op("moe.route", "decode", experts=64, top_k=64))
            assert not variant.accepts(make_op("moe.route", "decode", experts=256, top_k=65))
            assert "64 experts" in variant.requirement
