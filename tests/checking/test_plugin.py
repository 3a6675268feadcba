"""A plugin's report: its variants, their worst errors and failures; a kernel that crashes does not end the check."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import pytest

from lily.checking import VariantReport, check_plugin
from lily.checking.check import Harness
from lily.checking.isolation import MOST_CRASHES, can_isolate, isolated_results
from lily.errors import PluginError, UsageError
from lily.hosts.base import Host
from lily.hosts.cpu import CpuHost
from lily.hosts.meta import MetaHost
from lily.ops import Op
from lily.plan import Plan
from lily.registry import KernelVariant, Registry
from tests.checking.python_variants import FAULTS, Parts, python_linear, right


class Plugin:
    def __init__(self, *variants: KernelVariant) -> None:
        self._variants = variants

    def lily_variants(self) -> Sequence[KernelVariant]:
        return self._variants


@pytest.fixture
def host() -> Iterator[Host]:
    host = CpuHost(threads=2)
    yield host
    host.close()


def registry_with(*variants: KernelVariant) -> Registry:
    registry = Registry()
    registry.register(Plugin(*variants), "third_party")
    return registry


def test_a_right_plugin_passes_with_its_worst_error(host: Host) -> None:
    seen: list[str] = []
    reports = check_plugin(
        registry_with(python_linear()), "third_party", host, progress=lambda report: seen.append(report.variant.name)
    )
    assert seen == ["python"]
    [report] = reports
    assert report.passed
    assert report.cases >= 2
    assert 0 < report.worst < 1
    assert " f32" in report.worst_case


def test_a_faulty_plugin_is_reported_case_by_case(host: Host) -> None:
    fault = FAULTS["last_row_missing"]
    [report] = check_plugin(registry_with(python_linear(fault.work, fault.accesses)), "third_party", host)
    assert not report.passed
    assert len(report.failures) == report.cases
    assert "is NaN" in report.failures[0].message


def crashing(end: object, *, rows: int) -> KernelVariant:
    """A variant that ends its process at one number of rows."""

    def work(p: Parts) -> None:
        if p.op.shape["rows"] == rows:
            assert callable(end)
            end()
        right(p)

    return python_linear(work)


def abort() -> None:
    os.write(2, b"lily: kernel planted: needs more bytes than were bound\n")
    os.abort()


if sys.platform.startswith("linux"):  # where checks run in a process of their own

    def test_a_crash_fails_its_case_and_the_others_go_on(host: Host) -> None:
        [whole] = check_plugin(registry_with(python_linear()), "third_party", host)
        [report] = check_plugin(registry_with(crashing(abort, rows=33)), "third_party", host)
        assert report.cases == whole.cases
        assert [("rows=33" in failure.case) for failure in report.failures] == [True] * len(report.failures)
        assert "ended by SIGABRT: lily: kernel planted: needs more bytes than were bound" in report.failures[0].message

    def test_after_some_crashes_the_rest_is_left_out(host: Host) -> None:
        def exit_three() -> None:
            os._exit(3)

        harness = Harness(host, Registry(), policies=[])
        variant = python_linear(lambda p: exit_three())
        results = list(isolated_results(harness, variant))
        assert len(results) == MOST_CRASHES + 1
        assert not any(result.passed for result in results)
        assert "exit code 3" in results[0].message
        assert "left out after 3 crashes" in results[-1].message


def test_only_the_cpu_host_can_be_isolated(host: Host) -> None:
    assert can_isolate(host) == sys.platform.startswith("linux")
    assert not can_isolate(MetaHost())


def test_a_plugin_without_variants_for_the_host_has_no_reports(host: Host) -> None:
    def encode(op: Op, plan: Plan) -> None:
        raise AssertionError("a variant of another host was recorded")

    elsewhere = KernelVariant("linear", "elsewhere", "metal", encode, "for another host")
    assert check_plugin(registry_with(elsewhere), "third_party", host) == []


def test_an_unknown_plugin_is_refused_with_those_there_are(host: Host) -> None:
    with pytest.raises(UsageError, match=r"no plugin called 'other'; installed: third_party"):
        check_plugin(registry_with(python_linear()), "other", host)


def test_a_broken_plugin_is_refused_with_its_reason(host: Host) -> None:
    registry = registry_with()
    registry.broken["broken"] = "plugin broken: ImportError: no module named kernels"
    with pytest.raises(PluginError, match="no module named kernels"):
        check_plugin(registry, "broken", host)


def test_a_report_keeps_the_worst_of_what_passed() -> None:
    from lily.checking import CaseResult

    report = VariantReport(python_linear())
    report.add(CaseResult("a", {}, 1e-7, 1e-6, passed=True))
    report.add(CaseResult("b", {}, 5e-7, 1e-6, passed=True))
    report.add(CaseResult("c", {}, 5e-6, 1e-6, passed=False, message="off"))
    assert (report.cases, report.worst, report.worst_case) == (3, 0.5, "b")
    assert [failure.case for failure in report.failures] == ["c"]
