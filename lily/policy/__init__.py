"""Policies: YAML files that choose a kernel variant for every op, and set how steps are executed.

``Policy.load`` reads one with everything it extends, checks it against the op table and the registry, and reports
every mistake with file and line. ``docs/policies.md`` is the guide for those who write one.
"""

from __future__ import annotations

from lily.policy.execution import SETTINGS, Execution, Setting
from lily.policy.file import MATCH_KEYS
from lily.policy.loading import auto_policy, available
from lily.policy.policy import Choice, MissingVariant, Policy, Workload
from lily.policy.rules import Rule
from lily.policy.show import (
    Considered,
    Difference,
    Explanation,
    diff,
    explain,
    rule_text,
    to_yaml,
)

__all__ = [
    "MATCH_KEYS",
    "SETTINGS",
    "Choice",
    "Considered",
    "Difference",
    "Execution",
    "Explanation",
    "MissingVariant",
    "Policy",
    "Rule",
    "Setting",
    "Workload",
    "auto_policy",
    "available",
    "diff",
    "explain",
    "rule_text",
    "to_yaml",
]
