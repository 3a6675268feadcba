"""``lily policy``: list, show, check, explain and compare policies."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from lily.cli.output import Column, count, print_json, say, show_table
from lily.cli.policy_json import considered_json, info_json, policy_json
from lily.errors import HostError, LilyError, PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lily.cli.output import Cell
    from lily.inventory import PolicyInfo
    from lily.policy import Considered
    from lily.registry import Registry

__all__ = ["command"]

EPILOG = """\b
Examples:
  lily policy list
  lily policy show m5max
  lily policy check my-chip.yaml
  lily policy explain cpu --op attention.decode --shape context=40000 head_dim=256 gqa_group=8
  lily policy diff m5max my-chip.yaml
"""
LIST_EPILOG = "Example: lily policy list --json"
SHOW_EPILOG = "Example: lily policy show m5max > my-chip.yaml"
CHECK_EPILOG = """\b
Example: lily policy check my-chip.yaml m5max
Exit code: 0 all is well, 1 a variant is missing here, 2 a file has mistakes.
"""
EXPLAIN_EPILOG = """\b
Examples:
  lily policy explain cpu --op moe.experts_in --phase prefill --shape rows_per_expert=64
  lily policy explain m5max --op attention.decode --shape context=40000 head_dim=256 gqa_group=8
"""
DIFF_EPILOG = "Example: lily policy diff m1 m5max"

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of this file, not of the alphabet


@click.group("policy", cls=_Group, epilog=EPILOG)
def command() -> None:
    """List, show, check, explain and compare policies.

    A policy is a YAML file that chooses a kernel variant for every op; see docs/policies.md. It is named by its file,
    or by its name if Lily or a plugin provides it.
    """


@command.command("list", short_help="Name the policies and say which can be used here.", epilog=LIST_EPILOG)
@_json_option
def list_(as_json: bool) -> None:
    """Policies that can be named: what they match, where they come from, whether they can be used here."""
    from lily.hosts.opening import choose_policy
    from lily.inventory import policies
    from lily.registry import default_registry

    registry = default_registry()
    found = policies(registry)
    try:
        auto = choose_policy("auto", "auto", registry).name
    except LilyError:
        auto = None  # there is no host, or no policy for it: the reasons in the list say why
    if as_json:
        print_json({"auto": auto, "policies": [info_json(info) for info in found]})
        return
    columns = [Column("policy"), Column("host"), Column("matches", fold=True), Column("from"), Column("usable here")]
    show_table(columns, [_info_row(info) for info in found])
    say()
    for reason, names in _by_reason(found).items():
        say(f"{_shortened(names)}: {reason}.")
    say("No policy matches this machine." if auto is None else f"--policy auto takes {auto} here.")


@command.command(short_help="Print a policy as one file.", epilog=SHOW_EPILOG)
@click.argument("name")
@_json_option
def show(name: str, as_json: bool) -> None:
    """Print a policy as one file, without `extends`, with the place where each line comes from."""
    from lily.policy import Policy, to_yaml
    from lily.registry import default_registry

    policy = Policy.load(name, default_registry())
    if as_json:
        print_json(policy_json(policy))
    else:
        _print_yaml(to_yaml(policy))


@command.command(short_help="Report every mistake of policy files.", epilog=CHECK_EPILOG)
@click.argument("files", nargs=-1, required=True, metavar="FILE…")
@_json_option
def check(files: tuple[str, ...], as_json: bool) -> None:
    """Report every mistake of policy files, and variants that they name but no plugin here provides."""
    from lily.registry import default_registry

    registry = default_registry()
    checked = [_checked(file, registry) for file in files]
    if as_json:
        print_json({"files": checked})
    else:
        for result in checked:
            _show_checked(result)
    if any(result["mistakes"] for result in checked):
        sys.exit(PolicyError.exit_code)
    if any(result["missing"] for result in checked):
        sys.exit(HostError.exit_code)


@command.command(short_help="Say which rule an op gets, and why.", epilog=EXPLAIN_EPILOG)
@click.argument("name")
@click.option("--op", required=True, help="An op, e.g. attention.decode.")
@click.option("--phase", help="decode or prefill; may be left out where the op has only one.")
@click.option(
    "--shape", "first", multiple=True, metavar="KEY=VALUE…", help="What the rules ask for, e.g. context=4096."
)
@click.argument("more", nargs=-1, metavar="[KEY=VALUE]…")
@_json_option
def explain(name: str, op: str, phase: str | None, first: Sequence[str], more: Sequence[str], as_json: bool) -> None:
    """Say which rule an op gets for a workload, and why the others do not match.

    Only keys that decide between the op's rules are needed. In decode, rows is 1.
    """
    from lily.cli.workload import shape_of, workload
    from lily.policy import Policy
    from lily.policy import explain as explain_rules
    from lily.registry import default_registry

    registry = default_registry()
    policy = Policy.load(name, registry)
    work, given = workload(policy, op, phase, shape_of((*first, *more)))
    explanation = explain_rules(policy, work)
    chosen = explanation.chosen
    known = chosen is not None and registry.variant(op, policy.host, chosen.use) is not None
    if as_json:
        considered = [considered_json(item) for item in explanation.considered]
        asked = {"op": op, "phase": work.phase, "shape": dict(given)}
        print_json({"policy": policy.name, **asked, "variant_available": known, "rules": considered})
        return
    shape = ", ".join(f"{key} {value}" for key, value in given.items())
    say(f"{op} in {work.phase}{' with ' if shape else ''}{shape}, under policy {policy.name}:")
    say()
    _show_considered(explanation.considered)
    if chosen is not None and not known:
        say()
        say(f"No plugin here provides variant {chosen.use} of {op} for host {policy.host}.")


@command.command(short_help="Say what two policies do differently.", epilog=DIFF_EPILOG)
@click.argument("a")
@click.argument("b")
@_json_option
def diff(a: str, b: str, as_json: bool) -> None:
    """Say what two policies do differently: devices, settings, and the rules of each op."""
    from rich.text import Text

    from lily.policy import Policy
    from lily.policy import diff as differences
    from lily.registry import default_registry

    registry = default_registry()
    left, right = (Policy.load(name, registry) for name in (a, b))
    found = differences(left, right)
    if as_json:
        items = [{"what": item.what, "left": list(item.left), "right": list(item.right)} for item in found]
        print_json({"left": left.name, "right": right.name, "differences": items})
        return
    if not found:
        say(f"{left.name} and {right.name} do the same.")
        return
    say(Text.assemble(("- ", "red"), left.name, "  ", ("+ ", "green"), right.name))
    for item in found:
        say()
        say(Text(item.what, style="bold"))
        _show_lines(item.left, item.right)


def _show_lines(left: Sequence[str], right: Sequence[str]) -> None:
    """Lines of either side; those that both have once."""
    from difflib import SequenceMatcher

    from rich.text import Text

    for tag, first, last, begin, end in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag == "equal":
            for line in left[first:last]:
                say(Text(f"  {line}", style="dim"), indent=2)
            continue
        for sign, style, lines in (("-", "red", left[first:last]), ("+", "green", right[begin:end])):
            for line in lines:
                say(Text(f"{sign} {line}", style=style), indent=2)


def _info_row(info: PolicyInfo) -> list[Cell]:
    from rich.text import Text

    usable = Text("yes", style="green") if info.usable else Text("no", style="red")
    if info.policy is None:
        return [info.name, "", "", info.plugin, usable]
    match = ", ".join(f"{key} {condition}" for key, condition in info.policy.match.items() if key != "host")
    return [info.name, info.policy.host, match, info.plugin, usable]


def _by_reason(found: Iterable[PolicyInfo]) -> Mapping[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for info in found:
        if info.reason is not None:
            reasons.setdefault(info.reason, []).append(info.name)
    return reasons


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _print_yaml(text: str) -> None:
    from rich.text import Text

    from lily.cli.output import console

    out = console()
    if not out.is_terminal:
        click.echo(text, nl=False)
        return
    for line in text.splitlines():
        code, mark, comment = line.partition("  # ")
        # Not wrapped at words: what is copied from the terminal has to stay YAML.
        out.print(Text.assemble(code, (mark + comment, "dim")), soft_wrap=True)


def _checked(file: str, registry: Registry) -> dict[str, Any]:
    """One file's part of ``check --json``."""
    from lily.policy import Policy

    result: dict[str, Any] = {"file": file, "name": None, "host": None, "rules": 0, "mistakes": [], "missing": []}
    try:
        policy = Policy.load(file, registry)
    except PolicyError as error:
        result["mistakes"] = str(error).splitlines()
        return result
    result["name"], result["host"] = policy.name, policy.host
    result["rules"] = sum(map(len, policy.kernels.values()))
    result["missing"] = [item._asdict() for item in policy.missing_variants(registry)]
    return result


def _show_checked(result: Mapping[str, Any]) -> None:
    from rich.text import Text

    file, rules, missing = result["file"], count(result["rules"], "rule"), result["missing"]
    for mistake in result["mistakes"]:
        say(Text(mistake, style="red"))
    if result["mistakes"]:
        return
    if not missing:
        say(Text.assemble(f"{file}: ", ("ok", "green"), f", {rules}"))
        return
    for item in missing:
        what = f"variant {item['variant']} of {item['op']} for host {result['host']}"
        say(f"{item['source']}: no plugin here provides {what}")
    say(f"{file}: no mistakes in {rules}, but {count(len(missing), 'variant')} missing here")


def _show_considered(considered: Sequence[Considered]) -> None:
    from rich.text import Text

    from lily.policy import rule_text

    styles = {"chosen": "bold green", "no": "", "after": "dim"}
    whys = {"chosen": "chosen", "after": "not reached"}
    columns = [Column("rule"), Column("says", fold=True), Column("outcome", fold=True)]
    rows = [
        [
            Text(cell, style=styles[item.outcome])
            for cell in (item.rule.source, rule_text(item.rule), whys.get(item.outcome) or "; ".join(item.reasons))
        ]
        for item in considered
    ]
    show_table(columns, rows)
