"""``lily doctor``: what this machine can run, and why not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from lily.cli.output import Column, bytes_text, count, heading, print_json, say, show_table
from lily.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lily.cli.output import Cell
    from lily.doctor import Diagnosis, ModelReport

__all__ = ["command"]

EPILOG = """\b
Examples:
  lily doctor
  lily doctor ~/models/Qwen3.6-35B-A3B-4bit
  lily doctor qwen3.6-35b-a3b --json

Exit code: 0, or 1 if no host works.
"""


@click.command("doctor", epilog=EPILOG)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str | None, as_json: bool) -> None:
    """Say what this machine can run, with a reason for each no, and whether a model fits in its memory.

    MODEL is a built-in name or a directory with a config.json; without one, the built-in models are looked at.
    """
    from lily.catalog import BUILTIN, find_model
    from lily.config import load_config
    from lily.doctor import diagnose
    from lily.registry import default_registry

    found = [find_model(name) for name in ([model] if model else BUILTIN)]
    models = [(item.name, load_config(item.path)) for item in found]
    try:
        registry = default_registry()
    except ImportError as error:
        raise PluginError(f"Lily's own plugin can't be imported ({error}); install Lily again") from error
    diagnosis = diagnose(registry, models)
    if as_json:
        print_json(doctor_json(diagnosis))
    else:
        show(diagnosis)
    if not diagnosis.works:
        sys.exit(1)


def show(diagnosis: Diagnosis) -> None:
    """The diagnosis for people."""
    _show_machine(diagnosis)
    say()
    _show_hosts(diagnosis)
    heading("Plugins and policy")
    for plugin in diagnosis.plugins:
        version = f" {plugin.version}" if plugin.version else ""
        say(f"{plugin.name}{version}: {count(len(plugin.variants), 'variant')}", indent=2)
    for reason in diagnosis.broken.values():
        say(_red(f"left out: {reason}"), indent=2)
    if diagnosis.policy is None:
        for line in str(diagnosis.policy_error).splitlines():
            say(_red(f"no policy: {line}"), indent=2)
    else:
        say(f"--policy auto takes {diagnosis.policy.name}", indent=2)
    heading("Memory for one session" + (f" under policy {diagnosis.policy.name}" if diagnosis.policy else ""))
    _show_models(diagnosis.models)
    if not diagnosis.works:
        say()
        say(_red("No host works here, so nothing can be run."))


def _show_machine(diagnosis: Diagnosis) -> None:
    machine = diagnosis.machine
    memory = machine.memory
    total = "unknown" if memory.total is None else bytes_text(memory.total)
    available = "" if memory.available is None else f", {bytes_text(memory.available)} available"
    limited = " (this container's limit)" if memory.limited else ""
    say(f"{machine.system} on {machine.architecture}, Python {machine.python}, Lily {_version()}")
    say(f"{machine.processor}, {count(machine.cores, 'usable core')}")
    say(f"Memory {total}{limited}{available}")


def _show_hosts(diagnosis: Diagnosis) -> None:
    rows: list[Sequence[Cell]] = []
    for host in diagnosis.hosts:
        rows.append([host.name, _yes(host.usable), host.summary if host.reason is None else f"needs {host.reason}"])
    show_table([Column("host"), Column("usable"), Column("", fold=True)], rows)
    if not diagnosis.instruction_sets:
        return
    rows = []
    for item in diagnosis.instruction_sets:
        text = "chosen" if item.chosen else "" if item.runs_here else "this processor does not have it"
        rows.append([item.name, _yes(item.runs_here), text])
    say()
    show_table([Column("CPU kernels for"), Column("usable"), Column("", fold=True)], rows)


def _show_models(models: Sequence[ModelReport]) -> None:
    columns = [
        Column("model", fold=True),
        *(Column(title, right=True) for title in ("weights", "state", "scratch", "context", "KV", "needs")),
        Column("fits"),
    ]
    rows: list[Sequence[Cell]] = []
    for model in models:
        if model.size is None:
            continue
        sizes = [model.size.checkpoint_bytes, model.size.state_bytes, model.size.scratch_bytes]
        for fit in model.fits:
            needs = map(bytes_text, (fit.kv_bytes, fit.needed_bytes))
            rows.append([model.name, *map(bytes_text, sizes), f"{fit.context:,}", *needs, _verdict(fit.verdict)])
    if rows:
        show_table(columns, rows)
    remarks: list[Cell] = [_red(f"{model.name}: {model.error}") for model in models if model.error is not None]
    for model in models:
        remarks += [
            f"{model.name} at {fit.context:,} tokens: {fit.reason}." for fit in model.fits if fit.verdict != "yes"
        ]
    if remarks and rows:
        say()
    for remark in remarks:
        say(remark)


def _yes(good: bool) -> Cell:
    from rich.text import Text

    return Text("yes", style="green") if good else Text("no", style="red")


def _verdict(verdict: str) -> Cell:
    from rich.text import Text

    return Text(verdict, style={"yes": "green", "no": "red"}.get(verdict, "yellow"))


def _red(text: str) -> Cell:
    from rich.text import Text

    return Text(text, style="red")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lily")
    except PackageNotFoundError:
        return "(not installed)"  # run from a checkout


def doctor_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The object of ``--json``; docs/cli.md describes its keys."""
    machine = diagnosis.machine
    return {
        "works": diagnosis.works,
        "lily": _version(),
        "python": machine.python,
        "system": machine.system,
        "architecture": machine.architecture,
        "processor": machine.processor,
        "cores": machine.cores,
        "memory_total_bytes": machine.memory.total,
        "memory_available_bytes": machine.memory.available,
        "memory_limited": machine.memory.limited,
        "hosts": [
            {"name": host.name, "usable": host.usable, "summary": host.summary, "reason": host.reason}
            for host in diagnosis.hosts
        ],
        "instruction_sets": [
            {"name": item.name, "runs_here": item.runs_here, "chosen": item.chosen}
            for item in diagnosis.instruction_sets
        ],
        "policy": None if diagnosis.policy is None else diagnosis.policy.name,
        "policy_error": diagnosis.policy_error,
        "plugins": [{"name": plugin.name, "version": plugin.version} for plugin in diagnosis.plugins],
        "broken_plugins": diagnosis.broken,
        "models": [_model_json(model) for model in diagnosis.models],
    }


def _model_json(model: ModelReport) -> dict[str, Any]:
    size = model.size
    if size is None:
        return {"name": model.name, "error": model.error}
    return {
        "name": model.name,
        "error": None,
        "max_context": size.limit,
        "checkpoint_bytes": size.checkpoint_bytes,
        "state_bytes": size.state_bytes,
        "scratch_bytes": size.scratch_bytes,
        "largest_context": model.largest_context,
        "fits": [
            {
                "context": fit.context,
                "kv_bytes": fit.kv_bytes,
                "needed_bytes": fit.needed_bytes,
                "verdict": fit.verdict,
                "reason": fit.reason,
            }
            for fit in model.fits
        ],
    }
