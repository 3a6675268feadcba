"""Every CPU variant against the float64 oracle of its op, on both sides of each switch of each shipped policy.

Tolerances and their reasons are in lily/checking/outcome.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lily import _cpu
from lily.checking import Case, Harness
from lily.checking.case import shape_of
from lily.checking.cases import cases_for, thresholds
from lily.checking.check import option_sets, shipped_policies
from lily.checking.outcome import Outcome
from lily.checking.problem_cache import ProblemCache
from lily.checking.running import record, run
from lily.hosts.cpu import CpuHost
from lily.ops import OPS
from lily.registry import KernelVariant, default_registry

REGISTRY = default_registry()
VARIANTS = sorted(REGISTRY.variants(host="cpu", plugin="lily_builtin"), key=lambda variant: list(OPS).index(variant.op))
BEST, *OTHERS = [name for name, supported in _cpu.isa_names() if supported]
POLICIES = shipped_policies()
PROBLEMS = ProblemCache()
EXACT_KEYS = ("rows", "context", "rows_per_expert", "gqa_group")
SMALL = 1100  # largest dimension of cases that every instruction set runs


def open_harness(isa: str) -> Iterator[Harness]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LILY_CPU_ISA", isa)
        host = CpuHost(threads=2)
        harness = Harness(host, REGISTRY, POLICIES, PROBLEMS)
        harness.peer()  # opened here, so that it has the same instruction set
    yield harness
    harness.close()
    host.close()


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    yield from open_harness(BEST)


@pytest.fixture(scope="module", params=OTHERS)
def other_harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    yield from open_harness(request.param)


def name_of(variant: KernelVariant) -> str:
    return f"{variant.op}-{variant.name}"


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_a_variant_agrees_with_the_oracle(harness: Harness, variant: KernelVariant) -> None:
    results = harness.check_variant(variant)
    failures = [str(result) for result in results if not result.passed]
    assert not failures, "\n".join([f"{len(failures)} of {len(results)} fail", *failures[:10]])


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_every_instruction_set_agrees_with_the_oracle(other_harness: Harness, variant: KernelVariant) -> None:
    small = [case for case in other_harness.cases(variant.op) if max(case.dims.values()) <= SMALL]
    results = other_harness.check_variant(variant, small[::2])
    failures = [str(result) for result in results if not result.passed]
    assert not failures, "\n".join([f"{len(failures)} of {len(results)} fail", *failures[:10]])


def test_every_op_has_a_variant_for_every_phase(harness: Harness) -> None:
    for op, spec in OPS.items():
        for phase in spec.phases:
            case = next(case for case in cases_for(op) if case.phase == phase)
            problem = PROBLEMS.problem(case, harness.host)
            assert any(variant.accepts(problem.op) for variant in VARIANTS if variant.op == op), (op, phase)


@pytest.mark.parametrize("op", OPS)
def test_cases_lie_on_both_sides_of_every_switch(op: str) -> None:
    shapes = [shape_of(case) for case in cases_for(op, POLICIES)]
    for key, edges in thresholds(POLICIES, op).items():
        values = {shape[key] for shape in shapes}
        for edge in edges:
            if key in EXACT_KEYS:
                assert {edge - 1, edge} <= values | {0}, (key, edge)
            else:
                assert min(values) < edge <= max(values) or edge > max(values) == edge - 1, (key, edge)


@pytest.mark.parametrize("cache", ["f32", "bf16"])
@pytest.mark.parametrize("position", [0, 63, 64, 1000])
def test_gqa_packing_changes_no_byte(harness: Harness, position: int, cache: str) -> None:
    general = REGISTRY.variant("attention.decode", "cpu", "general")
    packed = REGISTRY.variant("attention.decode", "cpu", "gqa_packed")
    assert general is not None
    assert packed is not None
    heads = {"heads": 8, "kv_heads": 1, "head_dim": 256}
    dims = {"rows": 1, "position": position, "context": position + 1, **heads}
    case = Case("attention.decode", "decode", dims, cache_dtype=cache)
    problem = PROBLEMS.problem(case, harness.host)
    y = problem.op.tensor("y").view

    def output(variant: KernelVariant, options: dict[str, object]) -> bytes:
        images = run(harness.host, problem, record(variant, problem, options))
        return Outcome(problem, images).bytes_of(y).tobytes()

    want = output(general, {})
    for options in option_sets(packed, case):
        assert output(packed, options) == want, options
