"""All variants of one plugin against the oracle: what ``lily plugins check`` reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lily.checking.check import CaseResult, Harness
from lily.checking.isolation import can_isolate, isolated_results
from lily.errors import PluginError, UsageError
from lily.hosts.base import Host
from lily.registry import KernelVariant, Registry

__all__ = ["VariantReport", "check_plugin"]


@dataclass
class VariantReport:
    """One variant's results.

    Attributes:
        cases: how many were run: each case with each choice of options counts.
        worst: the worst error as a part of its tolerance, of the cases that passed.
        worst_case: the case it was in.
        failures: what did not pass.
    """

    variant: KernelVariant
    cases: int = 0
    worst: float = 0.0
    worst_case: str = ""
    failures: list[CaseResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def add(self, result: CaseResult) -> None:
        """Count one result."""
        self.cases += 1
        if not result.passed:
            self.failures.append(result)
        elif result.share >= self.worst:
            self.worst, self.worst_case = result.share, result.case


def check_plugin(
    registry: Registry, plugin: str, host: Host, *, progress: Callable[[VariantReport], None] | None = None
) -> list[VariantReport]:
    """Check every variant that a plugin provides for a kind of host.

    On the CPU host under Linux each variant runs in a process of its own, so that a kernel that crashes is reported and
    the rest goes on; elsewhere a crash ends this process.

    Args:
        host: open, with the plugin's kernel libraries loaded.
        progress: called as each variant is done.

    Returns:
        one report a variant, in order of registration; none if the plugin has no variants for this kind of host.

    Raises:
        PluginError: the plugin is installed but could not be loaded.
        UsageError: there is no such plugin.
    """
    if plugin in registry.broken:
        raise PluginError(registry.broken[plugin])
    if plugin not in registry.plugins:
        raise UsageError(f"there is no plugin called {plugin!r}; installed: {', '.join(registry.plugins)}")
    harness = Harness(host, registry)
    reports: list[VariantReport] = []
    try:
        for variant in registry.variants(plugin=plugin, host=host.kind):
            report = VariantReport(variant)
            for result in _results(harness, variant):
                report.add(result)
            reports.append(report)
            if progress is not None:
                progress(report)
    finally:
        harness.close()
    return reports


def _results(harness: Harness, variant: KernelVariant) -> Iterable[CaseResult]:
    return isolated_results(harness, variant) if can_isolate(harness.host) else harness.results(variant)
