"""The policy: which variant does each op, and how steps are executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lily.errors import PolicyError, UsageError
from lily.ops import OPS, Op
from lily.policy.conditions import Condition, Ints
from lily.policy.document import unknown
from lily.policy.execution import Execution
from lily.policy.rules import Rule, lowest
from lily.registry import KernelVariant, Registry

__all__ = ["Choice", "MissingVariant", "Policy", "Workload"]


@dataclass(frozen=True)
class Workload:
    """An op's name, phase and shape, where there is no op yet: all that rules look at.

    Raises:
        UsageError: no such op or phase, or shape keys other than the op's.
    """

    name: str
    phase: str
    shape: Mapping[str, int]

    def __post_init__(self) -> None:
        spec = OPS.get(self.name)
        if spec is None:
            raise UsageError(unknown("op", self.name, tuple(OPS)))
        if self.phase not in spec.phases:
            raise UsageError(unknown("phase", self.phase, spec.phases, f"of {self.name}"))
        for key in self.shape:
            if key not in spec.shape:
                raise UsageError(unknown("shape key", key, tuple(spec.shape), f"of {self.name}"))
        if missing := [key for key in spec.shape if key not in self.shape]:
            raise UsageError(f"the shape of {self.name} also needs {', '.join(missing)}")


@dataclass(frozen=True)
class Choice:
    """A policy's answer for one op.

    Attributes:
        options: of the variant, complete: what the rule says, defaults for the rest.
        rule: the rule that matched.
    """

    variant: KernelVariant
    options: Mapping[str, object]
    rule: Rule

    @property
    def source(self) -> str:
        """``file:line`` of the rule."""
        return self.rule.source


class MissingVariant(NamedTuple):
    """A rule whose variant no plugin provides."""

    source: str
    op: str
    variant: str


@dataclass(frozen=True)
class Policy:
    """Ordered rules per op, first match wins, and execution settings.

    Attributes:
        name: as the file says, else the file's name.
        path: the file.
        extends: files it builds on, nearest first, as messages name them.
        match: what devices it is made for, see :func:`lily.policy.auto_policy`.
        execution: settings, complete with defaults.
        kernels: rules of every op of ``OPS``, in that order.
        sources: ``file:line`` of each setting that a file gives (``execution.threads``, ``match.host``).
    """

    name: str
    path: Path
    extends: tuple[str, ...]
    match: Mapping[str, Condition]
    execution: Execution
    kernels: Mapping[str, tuple[Rule, ...]]
    sources: Mapping[str, str]

    @classmethod
    def load(cls, name_or_path: str | Path, registry: Registry) -> Policy:
        """A policy by file or by name, checked against what the registry provides.

        Args:
            name_or_path: a file, or the name of a policy of Lily's own or of a plugin, with or without ``.yaml``.

        Raises:
            PolicyError: there is none, or it has mistakes; every one of them has a line ``file:line: what``.
        """
        from lily.policy.loading import Library

        return Library(registry).load(name_or_path)

    @property
    def host(self) -> str:
        """The kind of host whose variants the rules name."""
        condition = self.match.get("host")
        return "cpu" if condition is None else str(condition.written)

    def rules(self, op: str) -> tuple[Rule, ...]:
        """The rules of an op, in order."""
        return self.kernels[op]

    def rule_for(self, work: Op | Workload) -> Rule:
        """The first rule that matches, whether or not a plugin provides its variant."""
        for rule in self.kernels[work.name]:
            if not rule.failing(work.phase, work.shape):
                return rule
        raise PolicyError(f"policy {self.name} has no rule for {describe_work(work)}")

    def choose(self, work: Op | Workload, host: str, registry: Registry) -> Choice:
        """The variant and options for an op on a kind of host.

        Whether the variant accepts the op is asked where there is one; a bare workload has too little to ask.

        Raises:
            PolicyError: the policy is for another host, no plugin provides the variant, or it does not accept the op.
        """
        if host != self.host:
            raise PolicyError(f"policy {self.name} is for host {self.host}, not for host {host}")
        rule = self.rule_for(work)
        variant = registry.variant(rule.op, host, rule.use)
        if variant is None:
            raise PolicyError(f"{rule.source}: no plugin here provides variant {rule.use} of {rule.op} for host {host}")
        if isinstance(work, Op) and not variant.accepts(work):
            needs = variant.requirement or "another shape"
            raise PolicyError(
                f"{rule.source}: variant {rule.use} of {rule.op} needs {needs}, "
                f"which {work.label} is not: {describe_work(work)}"
            )
        return Choice(variant, variant.complete(rule.options), rule)

    def breakpoints(self, key: str) -> list[int]:
        """Values of a shape key from which some op's answer may differ from that for the value before."""
        conditions = [rule.when[key].values for rules in self.kernels.values() for rule in rules if key in rule.when]
        edges = {edge for values in conditions if isinstance(values, Ints) for edge in values.edges}
        return sorted(edge for edge in edges if edge > lowest(key))

    def missing_variants(self, registry: Registry) -> list[MissingVariant]:
        """Every rule whose variant no plugin provides, in order of ops."""
        return [
            MissingVariant(rule.source, op, rule.use)
            for op, rules in self.kernels.items()
            for rule in rules
            if registry.variant(op, self.host, rule.use) is None
        ]


def describe_work(work: Op | Workload) -> str:
    """An op's phase and shape in one line."""
    shape = ", ".join(f"{key} {value}" for key, value in work.shape.items())
    return f"{work.name} in {work.phase} with {shape}"
