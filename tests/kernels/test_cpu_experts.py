"""CPU kernels of the experts' projections against the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lily_builtin.cpu_experts import VARIANTS
from numpy.typing import NDArray

from lily.checking import Case, Harness
from lily.checking.problem_cache import ProblemCache
from lily.checking.weights import Q4, Q8
from lily.hosts.cpu import CpuHost
from lily.ops import OPS, Operand, Phase
from lily.plan import SlotKind
from lily.reference import group, silu
from lily.registry import KernelVariant, Registry
from tests.kernels.packed import FORMATS, Packed, packed
from tests.kernels.workbench import ISAS, Workbench, named

SMALL = {"experts": 6, "top_k": 2, "hidden": 128, "expert_width": 128, "shared_width": 128}
DEMO = {"experts": 32, "top_k": 4, "hidden": 256, "expert_width": 64, "shared_width": 64}
# The real model's input widths, of in and out, with fewer outputs and experts.
REAL = {
    "moe.experts_in": {"experts": 9, "top_k": 8, "hidden": 2048, "expert_width": 64, "shared_width": 64},
    "moe.experts_out": {"experts": 9, "top_k": 8, "hidden": 256, "expert_width": 512, "shared_width": 512},
}
ROWS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64)
DECODE = ("gemv_fused", "gemv_split")
PREFILL = ("grouped", "grouped_split")
ROUNDING = 2e-6
"""Of the sum of a product's terms: eight units of float32 rounding; see test_cpu_linear.py."""


def cases(op: str) -> list[Case]:
    scenarios = cycle(("", "skewed", "one-sided"))
    table = [Case(op, "decode", {"rows": 1, **SMALL}, (fmt,)) for fmt in FORMATS]
    # "One-sided" gives all rows to the same experts, so that tiles of exactly so many rows and empty experts are met.
    for fmt, rows in zip(cycle(FORMATS), ROWS, strict=False):
        table.append(Case(op, "prefill", {"rows": rows, **SMALL, "tile_rows": 16}, (fmt,), scenario="one-sided"))
        table.append(Case(op, "prefill", {"rows": rows, **DEMO, "tile_rows": 32}, scenario=next(scenarios)))
    table.append(Case(op, "prefill", {"rows": 150, **SMALL, "tile_rows": 32}, (Q4, Q8), scenario="one-sided"))
    table.append(Case(op, "prefill", {"rows": 5, **REAL[op], "tile_rows": 16}))
    return [*table, Case(op, "decode", {"rows": 1, **DEMO}), Case(op, "decode", {"rows": 1, **REAL[op]})]


CASES = {variant.op: cases(variant.op) for variant in VARIANTS}
PROBLEMS = ProblemCache()


@pytest.fixture(scope="module", params=ISAS)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LILY_CPU_ISA", request.param)
        harness = Harness(CpuHost(threads=2), Registry(), [], PROBLEMS)
        harness.peer()  # opened here, so that it has the same instruction set
    yield harness
    harness.close()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.op}-{v.name}")
def test_variants_meet_the_oracle(harness: Harness, variant: KernelVariant) -> None:
    """Within the harness's tolerances; threads, barriers and leftovers in memory change no bit."""
    results = harness.check_variant(variant, CASES[variant.op])
    assert not [str(result) for result in results if not result.passed]


@pytest.fixture(scope="module", params=ISAS)
def bench(request: pytest.FixtureRequest) -> Iterator[Workbench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LILY_CPU_ISA", request.param)
        workbench = Workbench()
    yield workbench
    workbench.close()


class Layer:
    """The experts of a layer whose matrices differ in format, and a routing of some rows."""

    def __init__(self, bench: Workbench, data: st.DataObject, *, most_rows: int) -> None:
        draw = data.draw
        self.bench, self.rng = bench, np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.rows, self.experts = draw(st.integers(1, most_rows)), draw(st.integers(1, 9))
        self.top_k = draw(st.integers(1, self.experts))
        self.hidden, self.width, self.shared = (draw(st.sampled_from([128, 256, 384])) for _ in range(3))
        self.tile_rows = draw(st.sampled_from([16, 32]))
        self.ids = np.argsort(self.rng.random((self.rows, self.experts)), axis=1)[:, : self.top_k]
        self._formats = st.sampled_from(FORMATS)
        self._draw = draw

    def matrix(self, *shape: int) -> Packed:
        return packed(self.bench, self.rng, shape, self._draw(self._formats), offset=self._draw(st.integers(0, 3)))

    def run(self, op: str, name: str, operands: dict[str, Operand]) -> None:
        phase: Phase = "prefill" if name in PREFILL else "decode"
        found = group(self.ids, self.experts, self.tile_rows)
        blocks = np.column_stack([found.block_expert, found.block_row, found.block_rows])
        for role, values in {
            "ids": self.ids,
            "offsets": found.offsets,
            "order": found.slots,
            "inverse": found.rows,
            "blocks": blocks,
        }.items():
            if role == "ids" or (phase == "prefill" and f"{role}?" in OPS[op].operands):
                operands[role] = self.bench.tensor(values, "i32")
        shape = {"rows": self.rows, "experts": self.experts, "top_k": self.top_k, "hidden": self.hidden}
        shape |= {"expert_width": self.width, "rows_per_expert": self.ids.size // self.experts}
        options: dict[str, Any] = {"tile_rows": self.tile_rows} if phase == "prefill" else {}
        self.bench.run(named(VARIANTS, op, name), phase, shape, operands, **options)

    def slots(self, name: str) -> NDArray[np.int64]:
        """For each row of ``act``, its row and choice."""
        return group(self.ids, self.experts, 1).slots if name in PREFILL else np.arange(self.ids.size)


def gated(x: NDArray[Any], gate: Packed, up: Packed, expert: int | None = None) -> tuple[Any, Any]:
    """silu(gate · x) · (up · x), and what its rounding errors scale with; 1.1 is the steepest slope of SiLU."""
    g, g_size = gate.product(x, expert)
    u, u_size = up.product(x, expert)
    return silu(g) * u, 1.1 * g_size * np.abs(u) + np.abs(silu(g)) * u_size


@settings(max_examples=10, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", [*DECODE, *PREFILL])
def test_experts_in_of_any_formats(bench: Workbench, name: str, data: st.DataObject) -> None:
    """Gate and up in different formats take their input in different orders."""
    layer = Layer(bench, data, most_rows=11 if name in DECODE else 24)
    gate, up = (layer.matrix(layer.experts, layer.width, layer.hidden) for _ in range(2))
    shared_gate, shared_up = (layer.matrix(layer.shared, layer.hidden) for _ in range(2))
    h = np.float32(layer.rng.normal(size=(layer.rows, layer.hidden)))
    act, shared_act = bench.empty(layer.ids.size, layer.width), bench.empty(layer.rows, layer.shared)
    operands: dict[str, Operand] = {"h": bench.tensor(h), "act": act, "shared_act": shared_act}
    weights = {"gate": gate, "up": up, "shared_gate": shared_gate, "shared_up": shared_up}
    layer.run("moe.experts_in", name, operands | {role: weight.weight for role, weight in weights.items()})
    got = bench.read(act)
    for row, slot in enumerate(layer.slots(name)):
        token, choice = divmod(int(slot), layer.top_k)
        want, size = gated(h[token].astype(np.float64), gate, up, int(layer.ids[token, choice]))
        assert (np.abs(got[row] - want) <= ROUNDING * size).all()
    want, size = gated(h.astype(np.float64), shared_gate, shared_up)
    assert (np.abs(bench.read(shared_act) - want) <= ROUNDING * size).all()


@settings(max_examples=10, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", [*DECODE, *PREFILL])
def test_experts_out_of_any_formats(bench: Workbench, name: str, data: st.DataObject) -> None:
    layer = Layer(bench, data, most_rows=11 if name in DECODE else 24)
    down, shared_down = (
        layer.matrix(layer.experts, layer.hidden, layer.width),
        layer.matrix(layer.hidden, layer.shared),
    )
    x, act, shared_act = (
        np.float32(layer.rng.normal(size=shape))
        for shape in ((layer.rows, layer.hidden), (layer.ids.size, layer.width), (layer.rows, layer.shared))
    )
    weights = np.float32(layer.rng.random((layer.rows, layer.top_k + 1)))
    out = bench.tensor(x)
    operands: dict[str, Operand] = {"x": out, "down": down.weight, "shared_down": shared_down.weight}
    operands |= {"act": bench.tensor(act), "shared_act": bench.tensor(shared_act), "weights": bench.tensor(weights)}
    layer.run("moe.experts_out", name, operands)
    want, size = x.astype(np.float64), np.abs(x).astype(np.float64)
    value, terms = shared_down.product(shared_act.astype(np.float64))
    want, size = want + weights[:, -1:] * value, size + weights[:, -1:] * terms
    for row, slot in enumerate(layer.slots(name)):
        token, choice = divmod(int(slot), layer.top_k)
        value, terms = down.product(act[row].astype(np.float64), int(layer.ids[token, choice]))
        want[token] += weights[token, choice] * value
        size[token] += weights[token, choice] * terms
    assert (np.abs(bench.read(out) - want) <= ROUNDING * size).all()


@pytest.mark.parametrize(
    ("op", "name", "dispatches"),
    [
        ("moe.experts_in", "gemv_fused", 1),
        ("moe.experts_in", "gemv_split", 5),
        ("moe.experts_in", "grouped", 1),
        ("moe.experts_in", "grouped_split", 6),
        ("moe.experts_out", "gemv_fused", 1),
        ("moe.experts_out", "gemv_split", 3),
        ("moe.experts_out", "grouped", 2),
        ("moe.experts_out", "grouped_split", 4),
    ],
)
def test_fused_and_split_forms_move_the_chosen_experts_once(op: str, name: str, dispatches: int) -> None:
    from lily.checking.operands import build
    from lily.checking.running import record

    phase: Phase = "prefill" if name in PREFILL else "decode"
    rows = 3 if name in PREFILL else 1
    problem = build(Case(op, phase, {"rows": rows, **DEMO, "tile_rows": 16}))
    plan = record(named(VARIANTS, op, name), problem, {}).plan
    assert len(plan.steps) == dispatches
    chosen = rows * DEMO["top_k"]
    routed = ("gate", "up") if op == "moe.experts_in" else ("down",)
    stored = sum(problem.op.weight(role).moved(chosen) + problem.op.weight(f"shared_{role}").moved() for role in routed)
    assert abs(plan.traffic().read[SlotKind.WEIGHTS] - stored) <= len(routed) * 3  # each argument is rounded to bytes


def test_phases_are_told_apart() -> None:
    from tests.variants import make_op

    for variant in VARIANTS:
        wanted = "prefill" if variant.name in PREFILL else "decode"
        phases: tuple[Phase, ...] = ("prefill", "decode")
        assert [phase for phase in phases if variant.accepts(make_op(variant.op, phase))] == [wanted]
        assert wanted in variant.requirement
