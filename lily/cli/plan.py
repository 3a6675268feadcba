"""``lily plan``: what one step does, and what it moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lily.cli.output import (
    Column,
    bytes_text,
    console,
    count,
    heading,
    print_json,
    rate_text,
    say,
    seconds_text,
    show_table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lily.cli.output import Cell
    from lily.ops import Phase
    from lily.plan import Traffic
    from lily.plan_report import OpRow, PlanReport

__all__ = ["command"]

EPILOG = """\b
Examples:
  lily plan
  lily plan qwen3.6-35b-a3b --context 32768
  lily plan qwen3.6-35b-a3b --phase prefill --rows 512 --chip m1
  lily plan ./my-model --policy my-chip.yaml --json
"""
WIDE = 110
"""Columns from which an op fits on one line."""


@click.command("plan", epilog=EPILOG)
@click.argument("model", default="demo")
@click.option(
    "--phase", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True, help="Which kind of step."
)
@click.option("--context", type=click.IntRange(1), help="Tokens in the cache after the step. [default: 4096]")
@click.option("--rows", type=click.IntRange(1), help="Tokens the step reads. [default: 1, or a chunk of the policy]")
@click.option("--policy", default="auto", show_default=True, help="A policy file or name.")
@click.option("--chip", default="m5max", show_default=True, help="Whose memory bandwidth sets the floor.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def command(
    model: str, phase: Phase, context: int | None, rows: int | None, policy: str, chip: str, as_json: bool
) -> None:
    """Show the ops of one step: the variant and the rule that chose it, dispatches, stages, bytes.

    MODEL is a built-in name (demo, qwen3.6-35b-a3b) or a directory with a config.json; weights are not needed, and
    nothing runs. The floor is the time a chip takes to move the bytes that can't stay in caches.
    """
    from lily.catalog import find_model
    from lily.chips import find_chip
    from lily.config import load_config
    from lily.hosts.opening import choose_policy
    from lily.plan_report import plan_report, step_shape
    from lily.registry import default_registry

    registry = default_registry()
    found = find_model(model)
    config = load_config(found.path)
    chosen = choose_policy(policy, "auto", registry)
    shape = step_shape(config, found.name, chosen.execution.prefill_chunk, phase, rows, context)
    report = plan_report(config, found.name, chosen, registry, shape, find_chip(chip))
    if as_json:
        print_json(plan_json(report))
    else:
        show(report)


def show(report: PlanReport) -> None:
    """The report for people."""
    shape, policy = report.shape, f"policy {report.policy} for host {report.host}"
    say(f"{report.model}: {shape.phase} of {count(shape.rows, 'token')}")
    say(f"context {shape.context:,}, {policy}, activations {report.activation_dtype}, KV {report.kv_dtype}")
    say()
    _show_ops(report)
    heading("Bytes")
    _show_bytes(report)
    say()
    checkpoint = f"{report.checkpoint_bytes:,} B ({bytes_text(report.checkpoint_bytes)})"
    say(f"Checkpoint {checkpoint}, scratch memory {bytes_text(report.scratch_allocated_bytes)}.")
    chip = report.chip
    floor = (
        f"Floor on {chip.title}: weights, state and KV are {bytes_text(report.streamed_bytes)}, "
        f"{seconds_text(report.floor_s)} at {chip.bandwidth_gb_s} GB/s"
    )
    say(f"{floor}; at most {rate_text(report.ceiling_tok_s)}." if shape.phase == "decode" else f"{floor}.")
    for note in report.notes:
        say(note)


def _show_ops(report: PlanReport) -> None:
    out = console()
    if out.is_terminal and out.width < WIDE:
        columns, rows = _narrow(report)
    else:
        columns, rows = _wide(report)
    blank = [""] * (len(columns) - 5)
    read, written = _moved(report.traffic)
    total: list[Cell] = ["total", *blank, f"{report.dispatches:,}", f"{report.stages:,}", read, written]
    show_table(columns, rows, total=total)
    if report.host_calls:
        say(f"The plan stops {count(report.host_calls, 'time')} for the CPU.")


def _wide(report: PlanReport) -> tuple[list[Column], list[Sequence[Cell]]]:
    columns = [
        Column("where"),
        Column("op", style="dim"),
        Column("variant", style="cyan"),
        Column("options", fold=True),
        Column("rule", fold=True, style="dim"),
        *_NUMBERS,
    ]
    rows: list[Sequence[Cell]] = [
        [_label(row), row.op, row.variant, _options(row), row.rule, *_figures(row)] for row in report.ops
    ]
    return columns, rows


def _narrow(report: PlanReport) -> tuple[list[Column], list[Sequence[Cell]]]:
    """Two lines an op, for terminals of 80 columns."""
    from rich.text import Text

    columns = [Column("where, op"), Column("variant, rule", fold=True), Column("disp.", right=True), *_NUMBERS[1:]]
    rows: list[Sequence[Cell]] = []
    for row in report.ops:
        options = _options(row)
        where = Text.assemble(_label(row), "\n", (f"  {row.op}", "dim"))
        what = Text.assemble((row.variant, "cyan"), f" {options}" if options else "", "\n", (f"  {row.rule}", "dim"))
        rows.append([where, what, *_figures(row)])
    return columns, rows


_NUMBERS = [Column(title, right=True) for title in ("dispatches", "stages", "read", "written")]


def _label(row: OpRow) -> str:
    return f"{row.label} ×{row.count}" if row.count > 1 else row.label


def _options(row: OpRow) -> str:
    return " ".join(f"{name}={value}" for name, value in row.options.items())


def _figures(row: OpRow) -> list[str]:
    return [f"{row.dispatches:,}", f"{row.stages:,}", *_moved(row.traffic)]


def _moved(traffic: Traffic) -> tuple[str, str]:
    return bytes_text(sum(traffic.read.values())), bytes_text(sum(traffic.written.values()))


def _show_bytes(report: PlanReport) -> None:
    from lily.plan import SlotKind

    traffic = report.traffic
    rows: list[tuple[str, int, int]] = []
    for kind in SlotKind:
        if kind is SlotKind.STATE:
            rows.append(("recurrent state", *report.recurrent_state))
            rows.append(("convolution state", *report.convolution_state))
        else:
            name = "KV cache" if kind is SlotKind.KV else kind.value
            rows.append((name, traffic.read[kind], traffic.written[kind]))
    columns = [Column("of"), Column("read", right=True), Column("written", right=True)]
    show_table(columns, [[name, bytes_text(read), bytes_text(written)] for name, read, written in rows])


def plan_json(report: PlanReport) -> dict[str, Any]:
    """The object of ``--json``; docs/cli.md describes its keys."""
    chip, shape = report.chip, report.shape
    return {
        "model": report.model,
        "policy": report.policy,
        "host": report.host,
        "phase": shape.phase,
        "rows": shape.rows,
        "context": shape.context,
        "activation_dtype": report.activation_dtype,
        "kv_dtype": report.kv_dtype,
        "chip": {"name": chip.name, "title": chip.title, "bandwidth_gb_s": chip.bandwidth_gb_s},
        "ops": [_op_json(row) for row in report.ops],
        "totals": {
            "dispatches": report.dispatches,
            "stages": report.stages,
            "host_calls": report.host_calls,
            **_traffic_json(report.traffic),
            "recurrent_state_bytes": sum(report.recurrent_state),
            "convolution_state_bytes": sum(report.convolution_state),
            "streamed_bytes": report.streamed_bytes,
            "scratch_allocated_bytes": report.scratch_allocated_bytes,
            "checkpoint_bytes": report.checkpoint_bytes,
            "floor_s": report.floor_s,
            "ceiling_tok_s": report.ceiling_tok_s,
        },
        "notes": report.notes,
    }


def _op_json(row: OpRow) -> dict[str, Any]:
    return {
        "label": row.label,
        "count": row.count,
        "layers": list(row.layers),
        "op": row.op,
        "variant": row.variant,
        "options": row.options,
        "rule": row.rule,
        "dispatches": row.dispatches,
        "stages": row.stages,
        "host_calls": row.host_calls,
        **_traffic_json(row.traffic),
    }


def _traffic_json(traffic: Traffic) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind in traffic.read:
        name = kind.name.lower().removesuffix("s") if kind.name == "WEIGHTS" else kind.name.lower()
        found[f"{name}_bytes"] = traffic.total(kind)
        found[f"{name}_read_bytes"] = traffic.read[kind]
        found[f"{name}_written_bytes"] = traffic.written[kind]
    return found
