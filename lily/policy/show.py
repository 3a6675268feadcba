"""Policies for people: fully resolved YAML, differences, and why a rule was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import yaml

from lily.ops import OPS, Op
from lily.policy.conditions import Condition
from lily.policy.execution import Execution
from lily.policy.policy import Policy, Workload
from lily.policy.rules import Rule

__all__ = ["Considered", "Difference", "Explanation", "diff", "explain", "rule_text", "to_yaml"]


@dataclass(frozen=True)
class Considered:
    """One rule in an explanation.

    Attributes:
        outcome: ``chosen``, ``no`` (a condition does not hold) or ``after`` (an earlier rule was chosen).
        reasons: for ``no``, each condition that does not hold, e.g. "context is 100, not >= 32768".
    """

    rule: Rule
    outcome: Literal["chosen", "no", "after"]
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = {"chosen": "chosen", "no": "; ".join(self.reasons), "after": "not reached"}[self.outcome]
        return f"{self.rule.source}: {rule_text(self.rule)}: {why}"


@dataclass(frozen=True)
class Explanation:
    """Every rule of one op, for one workload, in order."""

    work: Op | Workload
    considered: tuple[Considered, ...]

    @property
    def chosen(self) -> Rule | None:
        return next((item.rule for item in self.considered if item.outcome == "chosen"), None)


@dataclass(frozen=True)
class Difference:
    """One thing that two policies say differently: ``what`` is e.g. ``execution.threads`` or ``kernels.linear``.

    ``left`` and ``right`` are its lines in either; a setting has one, an absent match key none, an op a line a rule.
    """

    what: str
    left: tuple[str, ...]
    right: tuple[str, ...]


def explain(policy: Policy, work: Op | Workload) -> Explanation:
    """Which rule wins for a workload, and why the ones before it do not match."""
    considered: list[Considered] = []
    found = False
    for rule in policy.rules(work.name):
        if found:
            considered.append(Considered(rule, "after"))
            continue
        failing = rule.failing(work.phase, work.shape)
        given = {"phase": work.phase, **work.shape}
        reasons = tuple(f"{key} is {given[key]}, not {rule.when[key]}" for key in failing)
        found = not failing
        considered.append(Considered(rule, "chosen" if found else "no", reasons))
    return Explanation(work, tuple(considered))


def diff(left: Policy, right: Policy) -> list[Difference]:
    """What two policies say differently, wherever they say it: match, settings, then rules of each op.

    Rules are compared by what they mean: ``< 48`` equals ``<= 47``. Names and files are not compared.
    """
    found: list[Difference] = []
    for key in dict.fromkeys([*left.match, *right.match]):
        one, other = left.match.get(key), right.match.get(key)
        if _meaning(one) != _meaning(other):
            found.append(Difference(f"match.{key}", _match_lines(one), _match_lines(other)))
    for setting in fields(Execution):
        values = [str(getattr(policy.execution, setting.name)) for policy in (left, right)]
        if values[0] != values[1]:
            found.append(Difference(f"execution.{setting.name}", (values[0],), (values[1],)))
    for op in OPS:
        if _rules_meaning(left.rules(op)) != _rules_meaning(right.rules(op)):
            lines = [tuple(map(rule_text, policy.rules(op))) for policy in (left, right)]
            found.append(Difference(f"kernels.{op}", lines[0], lines[1]))
    return found


def to_yaml(policy: Policy) -> str:
    """The policy as one file without ``extends``; a comment on each line says which file and line it comes from."""
    lines = [f"# {' extends '.join([policy.path.name, *policy.extends])}", "version: 1", f"name: {_flow(policy.name)}"]
    if policy.match:
        lines.append("match:")
        for key, condition in policy.match.items():
            lines.append(_commented(f"  {key}: {_flow(_plain(condition))}", policy.sources[f"match.{key}"]))
    lines.append("execution:")
    for setting in fields(Execution):
        source = policy.sources.get(f"execution.{setting.name}", "default")
        value = _flow(getattr(policy.execution, setting.name))
        lines.append(_commented(f"  {setting.name}: {value}", source))
    lines.append("kernels:")
    for op, rules in policy.kernels.items():
        lines.append(f"  {op}:")
        lines.extend(_commented(f"    - {rule_text(rule)}", rule.source) for rule in rules)
    return "\n".join(lines) + "\n"


def rule_text(rule: Rule) -> str:
    """A rule as it would stand on one line of a policy file."""
    parts: dict[str, Any] = {}
    if rule.when:
        parts["when"] = {key: _plain(condition) for key, condition in rule.when.items()}
    parts["use"] = rule.use
    if rule.options:
        parts["with"] = dict(rule.options)
    return _flow(parts)


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(condition: Condition) -> Any:
    return list(condition.written) if isinstance(condition.written, tuple) else condition.written


def _commented(line: str, comment: str) -> str:
    return f"{line}  # {comment}"


def _match_lines(condition: Condition | None) -> tuple[str, ...]:
    return () if condition is None else (_flow(_plain(condition)),)


def _meaning(condition: Condition | None) -> object:
    return None if condition is None else condition.values


def _rules_meaning(rules: Sequence[Rule]) -> list[object]:
    return [(rule.box, rule.use, dict(rule.options)) for rule in rules]
