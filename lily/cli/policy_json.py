"""Policies as JSON values; docs/cli.md describes their keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lily.inventory import PolicyInfo
    from lily.policy import Considered, Policy, Rule
    from lily.policy.conditions import Condition

__all__ = ["considered_json", "info_json", "policy_json"]


def info_json(info: PolicyInfo) -> dict[str, Any]:
    """One policy of ``policy list``."""
    policy = info.policy
    return {
        "name": info.name,
        "path": str(info.path),
        "plugin": info.plugin,
        "host": None if policy is None else policy.host,
        "match": {} if policy is None else _conditions_json(policy.match),
        "usable": info.usable,
        "reason": info.reason,
        "missing_variants": [item._asdict() for item in info.missing],
    }


def policy_json(policy: Policy) -> dict[str, Any]:
    """``policy show``."""
    return {
        "name": policy.name,
        "path": str(policy.path),
        "extends": list(policy.extends),
        "host": policy.host,
        "match": _conditions_json(policy.match),
        "execution": asdict(policy.execution),
        "kernels": {op: [_rule_json(rule) for rule in rules] for op, rules in policy.kernels.items()},
        "sources": dict(policy.sources),
    }


def considered_json(item: Considered) -> dict[str, Any]:
    """One rule of ``policy explain``."""
    return {**_rule_json(item.rule), "outcome": item.outcome, "reasons": list(item.reasons)}


def _rule_json(rule: Rule) -> dict[str, Any]:
    return {"when": _conditions_json(rule.when), "use": rule.use, "with": dict(rule.options), "source": rule.source}


def _conditions_json(conditions: Mapping[str, Condition]) -> dict[str, Any]:
    return {
        key: list(condition.written) if isinstance(condition.written, tuple) else condition.written
        for key, condition in conditions.items()
    }
