"""The harness finds each planted fault, and passes what is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lily.checking import Case, Harness, check_variant
from lily.checking.check import option_sets
from lily.checking.weights import F32, Q4
from lily.hosts.cpu import CpuHost
from lily.ops import Op
from lily.plan import Plan
from lily.registry import KernelVariant, Option, Registry
from tests.checking.python_variants import FAULTS, python_linear

CASES = [
    Case("linear", "decode", {"rows": 1, "in_features": 128, "out0": 33}, (F32,)),
    Case("linear", "prefill", {"rows": 5, "in_features": 96, "out0": 17}, (F32,)),
]


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    host = CpuHost(threads=2)
    harness = Harness(host, Registry(), policies=[])
    yield harness
    harness.close()
    host.close()


def variant(encode: object, **fields: object) -> KernelVariant:
    return KernelVariant("linear", "planted", "cpu", encode, "planted", **fields)  # type: ignore[arg-type]


def test_a_right_variant_passes(harness: Harness) -> None:
    results = harness.check_variant(python_linear(), CASES)
    assert [result.passed for result in results] == [True, True]
    assert all(0 < result.worst_error < result.tolerance for result in results)
    assert results[0].message == ""


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_found(harness: Harness, name: str) -> None:
    fault = FAULTS[name]
    results = harness.check_variant(python_linear(fault.work, fault.accesses), CASES)
    assert results
    assert not any(result.passed for result in results)
    assert all(fault.message in result.message for result in results), results[0]


def test_a_spoilt_input_does_not_spoil_the_next_check(harness: Harness) -> None:
    harness.check_variant(python_linear(FAULTS["changes_its_weight"].work), CASES)
    assert all(result.passed for result in harness.check_variant(python_linear(), CASES))


def test_an_unknown_kernel_is_a_failure_that_names_it(harness: Harness) -> None:
    def encode(op: Op, plan: Plan) -> None:
        from lily.plan import read, write

        plan.dispatch("no_such_kernel", [read(op.tensor("x").view), write(op.tensor("y0").view)], tasks=1)

    results = harness.check_variant(variant(encode), CASES)
    assert not results[0].passed
    assert "no_such_kernel" in results[0].message


def test_an_exception_in_a_plugin_is_a_failure(harness: Harness) -> None:
    def encode(op: Op, plan: Plan) -> None:
        raise KeyError("layers")

    def accepts(op: Op) -> bool:
        raise ZeroDivisionError("no groups")

    assert "KeyError: 'layers'" in harness.check_variant(variant(encode), CASES)[0].message
    assert "ZeroDivisionError" in harness.check_variant(variant(encode, accepts=accepts), CASES)[0].message


def test_recording_nothing_is_a_failure(harness: Harness) -> None:
    results = harness.check_variant(variant(lambda op, plan: None), CASES)
    assert results[0].message == "it recorded no dispatch"


def test_a_variant_that_accepts_nothing_fails() -> None:
    host = CpuHost(threads=1)
    never = variant(lambda op, plan: None, accepts=lambda op: False, requirement="a miracle")
    results = check_variant(never, host, Registry(), cases=CASES)
    assert len(results) == 1
    assert not results[0].passed
    assert "never applicable" in results[0].message
    assert "a miracle" in results[0].message
    host.close()


def test_cases_that_are_not_accepted_do_not_count(harness: Harness) -> None:
    other = Case("linear", "decode", {"rows": 1, "in_features": 128, "out0": 33}, (Q4,))
    results = harness.check_variant(python_linear(), [*CASES, other])
    assert [result.case for result in results] == [case.name for case in CASES]


def test_options_are_tried_in_full_while_they_are_few() -> None:
    few = variant(None, options={"a": Option(1, (1, 2), ""), "b": Option(4, (3, 4), "")})
    assert option_sets(few, CASES[0]) == [{"a": a, "b": b} for a in (1, 2) for b in (3, 4)]
    assert option_sets(variant(None), CASES[0]) == [{}]


def test_of_many_options_each_choice_is_tried_once() -> None:
    many = variant(None, options={"a": Option(2, (1, 2, 3), ""), "b": Option("x", ("x", "y"), "")})
    assert option_sets(many, CASES[0]) == [
        {"a": 2, "b": "x"},
        {"a": 1, "b": "x"},
        {"a": 3, "b": "x"},
        {"a": 2, "b": "y"},
    ]


def test_experts_get_a_block_map_of_their_own_tile() -> None:
    dims = {"rows": 3, "experts": 4, "top_k": 2, "hidden": 64, "expert_width": 64, "shared_width": 64, "tile_rows": 16}
    options = {"tile_rows": Option(32, (16, 32), "")}
    experts_in = KernelVariant("moe.experts_in", "planted", "cpu", lambda: None, "", options=options)
    assert option_sets(experts_in, Case("moe.experts_in", "prefill", dims)) == [{"tile_rows": 16}]
    options = {"tile_rows": Option(32, (32,), "")}
    wide = KernelVariant("moe.experts_in", "planted", "cpu", lambda: None, "", options=options)
    assert option_sets(wide, Case("moe.experts_in", "prefill", dims)) == []


def test_a_result_reads_as_one_line(harness: Harness) -> None:
    result = harness.check_variant(python_linear(FAULTS["last_row_missing"].work), CASES)[0]
    expected = "linear decode rows=1 in_features=128 out0=33 f32: y0[0, 0] is NaN (33 of 33 elements)"
    assert str(result).startswith(expected)
