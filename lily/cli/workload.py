"""The workload that ``lily policy explain`` is asked about, from its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lily.errors import UsageError
from lily.ops import OPS
from lily.policy import Policy, Rule, Workload

__all__ = ["shape_of", "workload"]


def shape_of(pairs: Sequence[str]) -> dict[str, int]:
    """A shape from words like ``context=4096``.

    Raises:
        UsageError: a word is not of that form.
    """
    shape: dict[str, int] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value.isdecimal():
            raise UsageError(f"--shape takes KEY=VALUE with a whole number, e.g. context=4096, not {pair!r}")
        shape[key] = int(value)
    return shape


def workload(
    policy: Policy, op: str, phase: str | None, given: Mapping[str, int]
) -> tuple[Workload, Mapping[str, int]]:
    """The workload, and the part of its shape that is known; what no rule asks for is left open.

    Raises:
        UsageError: an unknown op, phase or key, or a key that decides between rules is missing.
    """
    spec = OPS.get(op)
    if spec is None:
        return Workload(op, phase or "", given), given  # which says that there is no such op
    if phase is None:
        if len(spec.phases) > 1:
            raise UsageError(f"{op} has rules for both phases; say --phase {' or --phase '.join(spec.phases)}")
        phase = spec.phases[0]
    shape = {"rows": 1, **given} if phase == "decode" and "rows" in spec.shape else dict(given)
    work = Workload(op, phase, {**dict.fromkeys(spec.shape, 1), **shape})
    if missing := _missing(policy.rules(op), {"phase": phase, **shape}):
        example = " ".join(f"{key}=N" for key in missing)
        raise UsageError(
            f"the rules of {op} in policy {policy.name} also ask for {', '.join(missing)}; add --shape {example}"
        )
    return work, shape


def _missing(rules: Sequence[Rule], known: Mapping[str, int | str]) -> list[str]:
    """Keys that are asked for up to the first rule that matches for certain, and not known."""
    missing: dict[str, None] = {}
    for rule in rules:
        missing.update(dict.fromkeys(key for key in rule.when if key not in known))
        if all(key in known and condition.holds(known[key]) for key, condition in rule.when.items()):
            break
    return list(missing)
