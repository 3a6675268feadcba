"""Faults planted around Lily's own kernels: what a variant may get wrong though its kernels are right."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator

import pytest

from lily.checking import Case, Harness
from lily.checking.isolation import isolated_results
from lily.hosts.cpu import CpuHost
from lily.ops import Op
from lily.plan import Access, Plan, read, update, write
from lily.registry import KernelVariant, Registry

CASES = [
    Case("deltanet.scan", "prefill", {"rows": rows, "key_heads": 1, "value_heads": 2, "head_dim": 64})
    for rows in (3, 17)
]


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    host = CpuHost(threads=2)
    harness = Harness(host, Registry(), policies=[])
    yield harness
    harness.close()
    host.close()


def scan(*, norm_writes: bool = False, lost_rows: int = 0, eps: float = 1.0, short: int = 0) -> KernelVariant:
    """The recurrence, then the gated norm, as the built-in variant ``direct`` records them, but for one fault."""

    def encode(op: Op, plan: Plan) -> None:
        shape = op.shape
        sizes = (shape["rows"] - lost_rows, shape["key_heads"], shape["value_heads"], shape["head_dim"])
        constants = struct.pack("<5If", *sizes, 1, op.params["eps"] * eps)
        y, q = op.tensor("y").view, op.tensor("q").view
        inputs: list[Access] = [read(q.part(0, q.nbytes - short))]
        inputs += [read(op.tensor(role).view) for role in ("k", "v", "decay", "beta")]
        plan.dispatch(
            "deltanet_scan",
            [*inputs, update(op.tensor("state").view), write(y)],
            constants=constants,
            tasks=shape["value_heads"],
        )
        plan.dispatch(
            "deltanet_gated_norm",
            [write(y) if norm_writes else update(y), read(op.tensor("z").view), read(op.tensor("norm").view)],
            constants=constants,
            tasks=shape["rows"] - lost_rows,
        )

    return KernelVariant("deltanet.scan", "planted", "cpu", encode, "planted")


def test_without_a_fault_it_passes(harness: Harness) -> None:
    assert all(result.passed for result in harness.check_variant(scan(), CASES))


def test_an_update_declared_as_a_write_is_found(harness: Harness) -> None:
    """The barrier would stand all the same; the bytes counted for the plan would be wrong."""
    for result in harness.check_variant(scan(norm_writes=True), CASES):
        assert not result.passed
        assert "deltanet_gated_norm does not give the same byte" in result.message


def test_a_row_that_is_not_computed_is_found(harness: Harness) -> None:
    for result in harness.check_variant(scan(lost_rows=1), CASES):
        assert not result.passed
        rows = int(result.case.split("rows=")[1].split()[0])
        assert f"y[{rows - 1}, 0] is NaN" in result.message


def test_a_wrong_constant_is_found(harness: Harness) -> None:
    for result in harness.check_variant(scan(eps=1e4), CASES):
        assert not result.passed
        assert result.message.startswith("y[")


if sys.platform.startswith("linux"):  # where checks run in a process of their own

    def test_too_small_a_range_of_an_input_ends_the_kernel_and_is_reported(harness: Harness) -> None:
        results = list(isolated_results(harness, scan(short=64)))
        assert results
        assert not any(result.passed for result in results)
        assert "ended by SIGABRT: lily: kernel deltanet_scan: needs more bytes than were bound" in results[0].message
