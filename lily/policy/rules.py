"""Rules: which variant an op gets, read from YAML and checked against the op table and the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from lily.ops import OPS, OpSpec
from lily.policy.conditions import (
    Box,
    Condition,
    Ints,
    TooManyPiecesError,
    overlap,
    read_condition,
    remainder,
)
from lily.policy.document import Mistakes, Reader, unknown
from lily.registry import KernelVariant, Registry

__all__ = [
    "OpRules",
    "Rule",
    "check_coverage",
    "check_reachable",
    "check_variants",
    "lowest",
    "read_rules",
]

_RULE_KEYS = ("when", "use", "with")
# Stands for conditions that can't be understood: such a rule takes nothing away from those after it.
_NEVER: Mapping[str, Condition] = {"phase": Condition(frozenset(), "never")}


@dataclass(frozen=True)
class Rule:
    """One rule of an op.

    Attributes:
        when: conditions by ``phase`` or shape key; all must hold. Empty: always.
        use: name of a variant.
        options: what the rule says under ``with``; the variant's defaults are not filled in.
        source: ``file:line``.
        lines: where each part stands (``use``, ``with.block``), for messages.
    """

    op: str
    when: Mapping[str, Condition]
    use: str
    options: Mapping[str, int | str]
    source: str
    lines: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def file(self) -> str:
        return self.source.rpartition(":")[0]

    @property
    def line(self) -> int:
        return int(self.source.rpartition(":")[2])

    @property
    def box(self) -> Box:
        return {key: condition.values for key, condition in self.when.items()}

    def failing(self, phase: str, shape: Mapping[str, int]) -> list[str]:
        """Keys whose condition does not hold; none if the rule matches."""
        given: Mapping[str, int | str] = {"phase": phase, **shape}
        return [key for key, condition in self.when.items() if not condition.holds(given[key])]


@dataclass(frozen=True)
class OpRules:
    """The rules a file has for one op; ``flawed`` if what was written there has a mistake."""

    rules: tuple[Rule, ...]
    flawed: bool = False


def lowest(key: str) -> int:
    """The least value a shape key can have: 1, except for the one that is rounded down."""
    return 0 if key == "rows_per_expert" else 1


def _domain(spec: OpSpec) -> Box:
    return {
        "phase": frozenset(spec.phases),
        **{key: Ints.span(lowest(key)) for key in spec.shape},
    }


def read_rules(reader: Reader, op: str, node: yaml.Node) -> OpRules:
    """The rules under one op, those that have no variant to name left out; mistakes are noted."""
    before = len(reader.mistakes)
    items = reader.items(node, f"the rules of {op}") or ()
    read = [_read_rule(reader, op, item) for item in items]
    rules = tuple(rule for rule in read if rule is not None)
    # A node that two rules share has its mistakes noted once, so the count alone does not tell.
    flawed = len(reader.mistakes) > before or any(rule.when is _NEVER for rule in rules)
    return OpRules(rules, flawed)


def _read_rule(reader: Reader, op: str, node: yaml.Node) -> Rule | None:
    what = f"a rule of {op}"
    entries = reader.mapping(node, what)
    if entries is None:
        return None
    parts = reader.known(entries, "key", _RULE_KEYS, f"in {what}")
    lines = {key: entry.line for key, entry in parts.items()}
    when = _read_when(reader, op, parts["when"].node) if "when" in parts else {}
    if len(parts) < len(entries):
        when = _NEVER  # the key that is not known may have been meant as when
    options: dict[str, int | str] = {}
    if "with" in parts:
        for name, entry in (reader.mapping(parts["with"].node, f"with of {what}") or {}).items():
            lines[f"with.{name}"] = entry.line
            value = reader.scalar(entry.node, f"option {name!r}")
            if value is not None:
                options[name] = value
    if "use" not in parts:
        reader.mistake(node, f"{what} must say which variant to use")
        return None
    use = reader.word(parts["use"].node, f"use of {what}")
    if use is None:
        return None
    if not use.isidentifier():
        reader.mistake(parts["use"].node, f"use of {what} must be a variant's name, not {use!r}")
        return None
    return Rule(op, when, use, options, reader.source(node), lines)


def _read_when(reader: Reader, op: str, node: yaml.Node) -> Mapping[str, Condition]:
    """Conditions by key; ``_NEVER`` if there is a mistake among them."""
    domain = _domain(OPS[op])
    before, flawed = len(reader.mistakes), False
    conditions: dict[str, Condition] = {}
    entries = reader.mapping(node, f"when of a rule of {op}") or {}
    for key, entry in reader.known(entries, "shape key", tuple(domain), f"of {op}").items():
        words = ("prefill", "decode") if key == "phase" else None
        condition = read_condition(reader, entry.node, key, words)
        if condition is None:
            flawed = True
            continue
        if not overlap(domain[key], condition.values):
            reader.mistake(entry.node, f"this rule of {op} can never match: {key} is never {condition}")
        conditions[key] = condition
    return _NEVER if flawed or len(reader.mistakes) > before else conditions


def check_reachable(rules: Sequence[Rule], mistakes: Mistakes) -> None:
    """Note every rule that can never match because the rules before it take all it would."""
    domain = _domain(OPS[rules[0].op]) if rules else {}
    for index, rule in enumerate(rules):
        box = {**domain, **rule.box}
        if not all(box.values()):
            continue
        earlier = rules[:index]
        single = next((other for other in earlier if not remainder(box, [other.box])), None)
        try:
            if single is None and remainder(box, [other.box for other in earlier]):
                continue
        except TooManyPiecesError:
            mistakes.add(
                rule.file,
                rule.line,
                f"the rules of {rule.op} overlap in too many ways to tell whether this one can match",
            )
            return
        if single is None:
            reason = "the rules before it take all that it would"
        elif single.when:
            reason = f"the rule on line {single.line} takes all that it would"
        else:
            reason = f"the rule on line {single.line} has no when and takes everything"
        mistakes.add(rule.file, rule.line, f"this rule of {rule.op} can never match: {reason}")


def check_coverage(rules: Sequence[Rule], mistakes: Mistakes) -> None:
    """Note an op whose rules leave some workload without a variant."""
    last = rules[-1]
    domain = _domain(OPS[last.op])
    try:
        left = remainder(domain, [rule.box for rule in rules])
    except TooManyPiecesError:
        mistakes.add(last.file, last.line, f"the last rule of {last.op} must have no when")
        return
    if left:
        where = ", ".join(_part_text(key, left[0], domain) for key in domain if left[0][key] != domain[key])
        mistakes.add(
            last.file,
            last.line,
            f"no rule of {last.op} matches where {where}; end with a rule that has no when",
        )


def _part_text(key: str, box: Box, domain: Box) -> str:
    values = box[key]
    if isinstance(values, Ints):
        return f"{key} is {values}"
    return f"{key} is {' or '.join(sorted(values))}"


def check_variants(rules: Sequence[Rule], host: str, registry: Registry, mistakes: Mistakes) -> None:
    """Note variants and options that the registry does not know for this host."""
    for rule in rules:
        variant = registry.variant(rule.op, host, rule.use)
        if variant is not None:
            _check_options(rule, variant, mistakes)
            continue
        line = rule.lines.get("use", rule.line)
        owner = f"of {rule.op} on host {host}"
        names = [variant.name for variant in registry.variants(op=rule.op, host=host)]
        if names:
            mistakes.add(rule.file, line, unknown("variant", rule.use, names, owner))
        else:
            mistakes.add(
                rule.file,
                line,
                f"unknown variant '{rule.use}' {owner}; no plugin provides one",
            )


def _check_options(rule: Rule, variant: KernelVariant, mistakes: Mistakes) -> None:
    for name, value in rule.options.items():
        line = rule.lines.get(f"with.{name}", rule.line)
        owner = f"{rule.op}/{variant.name}"
        option = variant.options.get(name)
        if option is not None and value in option.choices:
            continue
        if option is not None:
            choices = " or ".join(map(str, option.choices))
            text = f"option {name} of {owner} must be {choices}, not {value!r}"
        elif variant.options:
            text = unknown("option", name, tuple(variant.options), f"of {owner}")
        else:
            text = f"unknown option {name!r} of {owner}; it takes none"
        mistakes.add(rule.file, line, text)
