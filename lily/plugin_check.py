"""Holding the variants of plugins against the oracles of their ops: what ``lily plugins check`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches

from lily.checking import CaseResult, Harness, VariantReport
from lily.checking.isolation import can_isolate, isolated_results
from lily.errors import HostError, PluginError, UsageError
from lily.hosts.opening import unavailable_reason
from lily.ops import OPS
from lily.policy import Execution
from lily.registry import KernelVariant, Registry

__all__ = ["VariantCheck", "check_variants", "select_variants"]

Progress = Callable[[KernelVariant, int], None]


@dataclass(frozen=True)
class VariantCheck:
    """What was found for one variant.

    Attributes:
        plugin: that provides it.
        skipped: why it could not be checked here; None if it was.
    """

    plugin: str
    report: VariantReport
    skipped: str | None = None

    @property
    def variant(self) -> KernelVariant:
        return self.report.variant

    @property
    def passed(self) -> bool:
        """Nothing failed, which a skipped variant has not either."""
        return self.report.passed


def select_variants(registry: Registry, plugin: str | None, op: str | None) -> list[KernelVariant]:
    """The variants of a plugin, or of all, for one op, or for all; those of one op follow each other.

    Raises:
        UsageError: there is no such plugin or op, or no such variant.
        PluginError: the plugin is broken.
    """
    if plugin is not None and plugin not in registry.plugins:
        if plugin in registry.broken:
            raise PluginError(f"{registry.broken[plugin]}; nothing of it can be checked")
        raise UsageError(f"there is no plugin called {plugin!r}; {_nearest(plugin, registry.plugins)}")
    if op is not None and op not in OPS:
        raise UsageError(f"there is no op called {op!r}; {_nearest(op, list(OPS))}")
    found = registry.variants(op=op, plugin=plugin)
    if not found:
        what = f"plugin {plugin}" if plugin else "no plugin"
        raise UsageError(f"{what} provides {'no' if plugin else 'a'} kernel variant{f' of {op}' if op else ''}")
    order = list(OPS)
    return sorted(found, key=lambda variant: (variant.host, order.index(variant.op)))


def check_variants(
    registry: Registry, variants: Sequence[KernelVariant], progress: Progress | None = None
) -> Iterator[VariantCheck]:
    """Check variants one after the other; each host is opened once.

    Args:
        progress: called after each case with the variant and how many were done before.

    Raises:
        HostError: none of them can be run here.
    """
    hosts = dict.fromkeys(variant.host for variant in variants)
    reasons = {host: unavailable_reason(host, registry) for host in hosts}
    if all(reason is not None for reason in reasons.values()):
        first, reason = next(iter(reasons.items()))
        raise HostError(f"nothing can be checked here: host {first} needs {reason}")
    with ExitStack() as opened:
        harnesses = {host: _harness(host, registry, opened) for host, reason in reasons.items() if reason is None}
        for variant in variants:
            report = VariantReport(variant)
            plugin = registry.owner(variant)
            if variant.host not in harnesses:
                yield VariantCheck(plugin, report, f"host {variant.host} needs {reasons[variant.host]}")
                continue
            for result in _results(harnesses[variant.host], variant):
                if progress is not None:
                    progress(variant, report.cases)
                report.add(result)
            yield VariantCheck(plugin, report)


def _harness(kind: str, registry: Registry, opened: ExitStack) -> Harness:
    host = registry.hosts[kind].open(Execution(), registry.kernel_libraries(kind))
    opened.callback(host.close)
    harness = Harness(host, registry)
    opened.callback(harness.close)
    return harness


def _results(harness: Harness, variant: KernelVariant) -> Iterable[CaseResult]:
    """In a process of its own where that can be, so that a kernel that crashes does not end the check."""
    return isolated_results(harness, variant) if can_isolate(harness.host) else harness.results(variant)


def _nearest(word: str, known: Sequence[str]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there is {', '.join(known)}"
