"""CPU kernels of the dense ops that read weights, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lily_builtin.cpu_linear import VARIANTS
from numpy.typing import NDArray

from lily.checking import Case, Harness
from lily.checking.problem_cache import ProblemCache
from lily.checking.weights import Q4, Q8, WeightFormat
from lily.hosts.cpu import CpuHost
from lily.ops import Phase
from lily.plan import SlotKind
from lily.reference import rms_norm
from lily.registry import KernelVariant, Registry
from tests.kernels.packed import FORMATS, packed
from tests.kernels.workbench import ISAS, Workbench, named

EPS = 1e-6
ROWS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64)
# Around quads, vectors, tasks and blocks of outputs.
OUTPUTS = (1, 3, 4, 5, 15, 16, 17, 24, 47, 48, 49, 95, 96, 97)
LINEAR = ("gemv", "gemv_split", "gemm")
ROUNDING = 2e-6
"""Of the sum of a product's terms: eight units of float32 rounding, which sums of some hundred terms in each of
several lanes stay far below, and a wrong column, group or row does not."""


def phase_of(rows: int) -> Phase:
    return "decode" if rows == 1 else "prefill"


def linear_cases() -> list[Case]:
    def case(rows: int, cols: int, outs: tuple[int, ...], *formats: WeightFormat, scenario: str = "") -> Case:
        dims = {"rows": rows, "in_features": cols, **{f"out{i}": n for i, n in enumerate(outs)}}
        return Case("linear", phase_of(rows), dims, formats, scenario=scenario)

    scenarios = cycle(("norm", "", "residual"))
    formats = cycle(FORMATS)
    table = [case(rows, 128, (37,), next(formats), scenario=next(scenarios)) for rows in ROWS]
    table += [case(rows, 128, (37,), next(formats), scenario=next(scenarios)) for rows in (1, 33) for _ in FORMATS]
    table += [case(9, 64, (n,), Q4, scenario=next(scenarios)) for n in OUTPUTS]
    # The demo model's parts, its gates in 8 bits; the real model's, of which only the outputs are cut.
    for rows in (1, 17):
        table.append(case(rows, 256, (1024, 512, 4, 4), Q4, Q4, Q8, Q8, scenario="norm"))
        table.append(case(rows, 2048, (256, 128, 32, 32), Q4, scenario="norm"))
        table.append(case(rows, 4096, (64,), Q4, scenario="residual"))
    return table


def cases(op: str) -> list[Case]:
    if op == "linear":
        return linear_cases()
    vocab = {"vocab": 203, "hidden": 128}
    table = [Case(op, phase_of(rows), {"rows": rows, **vocab}, (fmt,)) for rows in (1, 17) for fmt in FORMATS]
    return [*table, Case(op, "decode", {"rows": 1, "vocab": 4096, "hidden": 256})]


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


def project(
    bench: Workbench, name: str, x: NDArray[Any], norm: NDArray[Any], weights: list[Any], **options: object
) -> Any:
    """The outputs of a linear of these weights, with norm."""
    outs = [bench.empty(len(x), w.weight.rows) for w in weights]
    operands = {"x": bench.tensor(x), "norm": bench.tensor(norm)}
    operands |= {f"w{i}": w.weight for i, w in enumerate(weights)} | {f"y{i}": y for i, y in enumerate(outs)}
    total = sum(w.weight.rows for w in weights)
    shape = {"rows": len(x), "in_features": x.shape[1], "out_features": total, "parts": len(weights)}
    shape["bits"] = min(w.weight.bits for w in weights)
    params = {"eps": EPS, "residual": 0.0}
    bench.run(named(VARIANTS, "linear", name), phase_of(len(x)), shape, operands, params, **options)
    return [bench.read(y) for y in outs]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", LINEAR)
def test_any_shape_and_any_offset(bench: Workbench, name: str, data: st.DataObject) -> None:
    """Parts of different formats and sizes over one input; a checkpoint's tensors begin at any byte."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    formats = data.draw(st.lists(st.sampled_from(FORMATS), min_size=1, max_size=4))
    unit = max([fmt.group_size for fmt in formats] + [1])
    cols = unit * data.draw(st.integers(1, 300 // unit))
    rows, offset = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 7))
    weights = [packed(bench, rng, (data.draw(st.integers(1, 60)), cols), fmt, offset=offset) for fmt in formats]
    x = np.float32(rng.normal(size=(rows, cols)) * 2.0 ** rng.integers(-4, 5, (rows, 1)))
    norm = np.float32(rng.uniform(0.5, 2, cols))
    options = {"tile_rows": data.draw(st.sampled_from([16, 32]))} if name == "gemm" else {}
    outs = project(bench, name, x, norm, weights, **options)
    h = rms_norm(x, norm, EPS)
    for got, weight in zip(outs, weights, strict=True):
        want, size = weight.product(h)
        assert (np.abs(got - want) <= ROUNDING * size + 1e-30).all()


@pytest.mark.parametrize("name", LINEAR)
def test_a_row_of_the_matrix_counts_for_itself_alone(bench: Workbench, name: str) -> None:
    """Not a number in one output's weights, or in one token, stays in its row and column."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(19, 128))
    x[7, 3] = np.nan
    weight = packed(bench, rng, (53, 128), FORMATS[-1])
    bad = weight.values.copy()
    bad[20, 100] = np.nan
    buffer = bench.buffers[weight.weight.weight.slot.index]
    bench.host.write(buffer, 0, np.float32(bad))
    (y,) = project(bench, name, x, np.ones(128), [weight])
    wrong = np.isnan(y)
    assert wrong[7].all()
    assert wrong[:, 20].all()
    assert wrong.sum() == 53 + 19 - 1


@pytest.mark.parametrize(("name", "dispatches"), [("gemv", 1), ("gemv_split", 5), ("gemm", 2)])
def test_fused_and_split_forms(name: str, dispatches: int) -> None:
    """Four parts under a norm: one launch, a norm and one a part, or packing and one product. Weights move once."""
    from lily.checking.operands import build
    from lily.checking.running import record

    case = next(case for case in linear_cases() if "out3" in case.dims and case.dims["rows"] == 1)
    problem = build(case)
    plan = record(named(VARIANTS, "linear", name), problem, {}).plan
    assert len(plan.steps) == dispatches
    assert plan.stages == min(dispatches, 2)
    stored = sum(problem.op.weight(f"w{i}").moved() for i in range(4))
    assert plan.traffic().read[SlotKind.WEIGHTS] - stored in (0, 4 * problem.op.shape["in_features"])
