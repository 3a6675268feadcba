"""``lily plugins``: what is installed, and whether its kernels are right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from lily.cli.output import Column, console, count, print_json, say, show_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lily.cli.output import Cell
    from lily.inventory import PluginInfo
    from lily.plugin_check import Progress, VariantCheck
    from lily.registry import KernelVariant, Registry

__all__ = ["command"]

EPILOG = """\b
Examples:
  lily plugins list --variants
  lily plugins check lily_example
"""
LIST_EPILOG = """\b
Examples:
  lily plugins list
  lily plugins list --variants --json
"""
CHECK_EPILOG = """\b
Examples:
  lily plugins check
  lily plugins check lily_example
  lily plugins check --op attention.decode --json

Exit code: 0, or 1 if a variant fails.
"""
SHOWN = 5  # failures of one variant that are written out


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of this file


@click.group("plugins", cls=_Group, epilog=EPILOG)
def command() -> None:
    """List kernel plugins, and check their kernels.

    A plugin is a Python distribution with an entry point of group `lily`; see docs/plugins.md.
    """


@command.command("list", short_help="What each plugin provides, and which are broken.", epilog=LIST_EPILOG)
@click.option("--variants", is_flag=True, help="Every kernel variant, with its options.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_(variants: bool, as_json: bool) -> None:
    """What each plugin provides, and which are broken and why."""
    from lily.inventory import plugins
    from lily.registry import default_registry

    registry = default_registry()
    found = plugins(registry)
    if as_json:
        print_json({"plugins": [_plugin_json(info, variants) for info in found], "broken": dict(registry.broken)})
        return
    columns = [
        *(Column(title) for title in ("plugin", "version")),
        *(Column(title, right=True) for title in ("variants", "ops")),
        *(Column(title, fold=True) for title in ("hosts", "policies")),
    ]
    show_table(columns, [_plugin_row(info) for info in found])
    if variants:
        say()
        _show_variants(found)
    _show_broken(registry)


@command.command(short_help="Hold kernels against the float64 oracles.", epilog=CHECK_EPILOG)
@click.argument("name", required=False)
@click.option("--op", help="Only variants of this op, e.g. attention.decode.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(name: str | None, op: str | None, as_json: bool) -> None:
    """Hold every variant of a plugin, or of all, against the float64 oracle of its op.

    Each is run over a table of shapes on both sides of every switch of the policies, with every choice of options.
    The worst error is a part of the tolerance it was held to: up to 1 passes.
    """
    from lily.plugin_check import check_variants, select_variants
    from lily.registry import default_registry

    registry = default_registry()
    chosen = select_variants(registry, name, op)
    checks: list[VariantCheck] = []
    with _progress(chosen) as progress:
        checks.extend(check_variants(registry, chosen, progress))
    failed = [item for item in checks if not item.passed]
    if as_json:
        print_json({"passed": not failed, "variants": [_check_json(item) for item in checks]})
    else:
        _show_checks(checks, failed)
    if failed:
        sys.exit(1)


def _plugin_row(info: PluginInfo) -> list[Cell]:
    hosts, policies = ", ".join(info.hosts), ", ".join(info.policies)
    return [info.name, info.version or "", f"{len(info.variants)}", f"{len(info.ops)}", hosts, policies]


def _show_variants(found: Sequence[PluginInfo]) -> None:
    from rich.text import Text

    variants = [variant for info in found for variant in info.variants]
    rows: list[Sequence[Cell]]
    if console().is_terminal:
        columns = [Column("variant"), Column("host"), Column("what it does", fold=True)]
        rows = []
        for variant in variants:
            options = _options(variant).replace(" ", "\n  ")
            name = Text.assemble(f"{variant.op}/", (variant.name, "cyan"), (f"\n  {options}" if options else "", "dim"))
            needs = f"; needs {variant.requirement}" if variant.requirement else ""
            rows.append([name, variant.host, Text.assemble(variant.summary, (needs, "dim"))])
    else:
        columns = [Column(title) for title in ("op", "host", "variant", "options, default first", "summary")]
        rows = [[variant.op, variant.host, variant.name, _options(variant), _summary(variant)] for variant in variants]
    show_table(columns, rows)


def _options(variant: KernelVariant) -> str:
    return " ".join(
        f"{name}={'|'.join(map(str, dict.fromkeys([option.default, *option.choices])))}"
        for name, option in variant.options.items()
    )


def _summary(variant: KernelVariant) -> str:
    return f"{variant.summary}; needs {variant.requirement}" if variant.requirement else variant.summary


def _show_broken(registry: Registry) -> None:
    from rich.text import Text

    if registry.broken:
        say()
    for reason in registry.broken.values():
        say(Text(f"left out: {reason}", style="red"))


def _plugin_json(info: PluginInfo, variants: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": info.name,
        "distribution": info.distribution,
        "version": info.version,
        "variant_count": len(info.variants),
        "ops": list(info.ops),
        "hosts": list(info.hosts),
        "policies": list(info.policies),
    }
    if variants:
        found["variants"] = [_variant_json(variant) for variant in info.variants]
    return found


def _variant_json(variant: KernelVariant) -> dict[str, Any]:
    return {
        "op": variant.op,
        "host": variant.host,
        "name": variant.name,
        "summary": variant.summary,
        "requirement": variant.requirement,
        "options": {
            name: {"default": option.default, "choices": list(option.choices), "help": option.help}
            for name, option in variant.options.items()
        },
    }


@contextmanager
def _progress(variants: Sequence[KernelVariant]) -> Iterator[Progress | None]:
    """A bar over the variants on standard error if that is a terminal, else nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield None
        return
    positions = {variant.key: position for position, variant in enumerate(variants)}
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=len(variants))

        def advance(variant: KernelVariant, cases: int) -> None:
            description = f"{variant.op}/{variant.name}, {count(cases, 'case')}"
            bar.update(task, completed=positions[variant.key], description=description)

        yield advance


def _show_checks(checks: Sequence[VariantCheck], failed: Sequence[VariantCheck]) -> None:
    from rich.text import Text

    columns = [
        *(Column(title, fold=True) for title in ("op", "variant", "plugin")),
        *(Column(title, right=True) for title in ("cases", "error / tolerance")),
        Column("result"),
    ]
    show_table(columns, [_check_row(item) for item in checks])
    for item in failed:
        say()
        failures = item.report.failures
        say(Text(f"{item.variant.op}/{item.variant.name}: {count(len(failures), 'case')} failed", style="red"))
        for result in failures[:SHOWN]:
            say(str(result), indent=2)
        if len(failures) > SHOWN:
            say(f"and {len(failures) - SHOWN} more", indent=2)
    skipped = dict.fromkeys(item.skipped for item in checks if item.skipped is not None)
    for reason in skipped:
        say()
        say(f"Skipped where {reason}.")


def _check_row(item: VariantCheck) -> list[Cell]:
    from rich.text import Text

    variant = item.variant
    if item.skipped is not None:
        result = Text("skipped", style="yellow")
    else:
        result = Text("ok", style="green") if item.passed else Text("failed", style="red")
    report = item.report
    worst = "" if item.skipped is not None else f"{_worst(item):.2g}"
    return [variant.op, variant.name, item.plugin, f"{report.cases:,}", worst, result]


def _worst(item: VariantCheck) -> float:
    """The worst error of all cases, those that failed included, as a part of its tolerance."""
    return max([item.report.worst, *(result.share for result in item.report.failures)])


def _check_json(item: VariantCheck) -> dict[str, Any]:
    from math import isfinite

    variant, report = item.variant, item.report
    worst = _worst(item)
    return {
        "plugin": item.plugin,
        "op": variant.op,
        "host": variant.host,
        "variant": variant.name,
        "passed": item.passed if item.skipped is None else None,
        "skipped": item.skipped,
        "cases": report.cases,
        "worst_error": worst if report.cases and isfinite(worst) else None,
        "worst_case": report.worst_case or None,
        "failures": [
            {"case": result.case, "options": dict(result.options), "message": result.message}
            for result in report.failures
        ],
    }
