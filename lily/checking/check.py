"""Holds kernel variants against the float64 oracle of their op, over a table of shapes.

One harness serves Lily's own tests and ``lily plugins check``. For each case and each choice of options it asks that
what a variant writes is within a stated tolerance of the oracle, that it writes all of its outputs and nothing else,
that its dispatches declare what they touch, and that barriers, threads and leftovers in memory change not one bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from lily.checking.agreement import disagreement, trespass
from lily.checking.case import Case
from lily.checking.cases import cases_for
from lily.checking.declared import audit, misdeclared
from lily.checking.expected import Finding, compare
from lily.checking.memory import POISON, STALE
from lily.checking.outcome import Judge, Outcome
from lily.checking.problem import Problem
from lily.checking.problem_cache import ProblemCache
from lily.checking.running import Recording, UndeclaredWriteError, record, run
from lily.errors import LilyError
from lily.hosts.base import Host
from lily.registry import KernelVariant, Registry

if TYPE_CHECKING:
    from lily.policy import Policy

__all__ = [
    "CaseResult",
    "Harness",
    "Trial",
    "check_variant",
    "failed",
    "never_applicable",
    "option_sets",
    "shipped_policies",
]

Trial: TypeAlias = tuple[Case, dict[str, object]]

AUDIT_LIMIT = 1 << 20  # bytes of operands and scratch up to which dispatches also run alone, with copies of them all
FULL_PRODUCT = 4  # options' choices are all combined up to so many; beyond, each is tried with defaults for the rest


@dataclass(frozen=True)
class CaseResult:
    """One case with one choice of options.

    Attributes:
        worst_error: of the output that comes nearest to its tolerance, or passes it furthest, in units of rounding; see
            :class:`lily.checking.expected.Expected`. Infinite where there is no number.
        tolerance: of that output.
        message: what is wrong, empty if it passed.
    """

    case: str
    options: Mapping[str, object]
    worst_error: float
    tolerance: float
    passed: bool
    message: str = ""

    @property
    def share(self) -> float:
        """The worst error as a part of its tolerance; up to 1 passes."""
        if self.worst_error == 0:
            return 0.0
        return self.worst_error / self.tolerance if self.tolerance else float("inf")

    def __str__(self) -> str:
        chosen = "".join(f" {name}={value}" for name, value in self.options.items())
        return f"{self.case}{chosen}: {self.message or 'passed'}"


@dataclass
class Harness:
    """Checks variants on one host.

    Args:
        host: what the variants run on.
        registry: where its further kernel libraries and the policies come from.
        policies: whose switches the cases must straddle; those that Lily ships, if None.
        problems: what was built for other variants, or on other hosts.
    """

    host: Host
    registry: Registry
    policies: Sequence[Policy] | None = None
    problems: ProblemCache = field(default_factory=ProblemCache)
    _peer: Host | None = None

    def check_variant(self, variant: KernelVariant, cases: Iterable[Case] | None = None) -> list[CaseResult]:
        """Every case that the variant accepts, with every choice of options."""
        return list(self.results(variant, cases))

    def results(self, variant: KernelVariant, cases: Iterable[Case] | None = None) -> Iterator[CaseResult]:
        """The same, one by one; if no case is accepted, one failed result that says so."""
        applicable = 0
        for case, options in self.trials(variant, cases):
            result = self.check(variant, case, options)
            if result is not None:
                applicable += 1
                yield result
        if not applicable:
            yield never_applicable(variant)

    def trials(self, variant: KernelVariant, cases: Iterable[Case] | None = None) -> list[Trial]:
        """Each case with each choice of options, whether or not the variant accepts it."""
        tried = self.cases(variant.op) if cases is None else cases
        return [(case, options) for case in tried for options in option_sets(variant, case)]

    def cases(self, op: str) -> list[Case]:
        """The cases of an op."""
        if self.policies is None:
            self.policies = shipped_policies()
        return cases_for(op, self.policies)

    def check(self, variant: KernelVariant, case: Case, options: Mapping[str, object]) -> CaseResult | None:
        """One case with one choice of options; None if the variant does not accept it."""
        try:
            problem = self.problems.problem(case, self.host)
            if not variant.accepts(problem.op):
                return None
            finding = self._examine(variant, problem, options)
        except UndeclaredWriteError as error:
            self.problems.forget(case)  # its inputs are no longer what the oracle saw
            return failed(case.name, options, str(error))
        except LilyError as error:
            return failed(case.name, options, str(error))
        except Exception as error:  # a plugin's Python may fail in any way; the check goes on and reports it
            return failed(case.name, options, f"{type(error).__name__}: {error}")
        return CaseResult(case.name, options, finding.error, finding.tolerance, finding.passed, finding.message)

    def close(self) -> None:
        """Free what the harness opened; the host stays open."""
        if self._peer is not None:
            self._peer.close()

    def _examine(self, variant: KernelVariant, problem: Problem, options: Mapping[str, object]) -> Finding:
        recording = record(variant, problem, options)
        if fault := misdeclared(problem, recording):
            return _fault(fault)
        outcome = Outcome(problem, run(self.host, problem, recording))
        if fault := trespass(problem, recording, outcome.images, POISON):
            return _fault(fault)
        oracle = self.problems.oracle(problem)
        worst = max((compare(got, expected) for got, expected in oracle(outcome)), key=lambda finding: finding.share)
        if not worst.passed:
            return worst
        serial = record(variant, problem, options, serial=True)
        fault = self._unsteady(recording, serial, oracle, outcome)
        return worst if fault is None else _fault(fault)

    def _unsteady(self, recording: Recording, serial: Recording, oracle: Judge, outcome: Outcome) -> str | None:
        """What changes bits of the output that must not: barriers, threads, or what memory held before."""
        problem, peer = outcome.problem, self.peer()
        other = Outcome(problem, run(peer, problem, serial, stale=STALE))
        if (place := disagreement(oracle, outcome, other)) is not None:
            causes = {
                "with a barrier before every dispatch": (self.host, serial, POISON),
                "with another number of threads": (peer, recording, POISON),
                "when unwritten memory holds something else": (self.host, recording, STALE),
            }
            for cause, (host, plan, stale) in causes.items():
                single = Outcome(problem, run(host, problem, plan, stale=stale))
                if (found := disagreement(oracle, outcome, single)) is not None:
                    return f"{found} differs {cause}"
            return f"{place} differs from run to run"
        if problem.memory.nbytes + recording.arena_nbytes > AUDIT_LIMIT:
            return None
        fault, alone = audit(self.host, problem, recording)
        if fault is None and (place := disagreement(oracle, outcome, Outcome(problem, alone))) is not None:
            fault = f"{place} differs when each dispatch runs with nothing but what it declares to read"
        return fault

    def peer(self) -> Host:
        """The same kind of host with another number of threads, if it has threads; else the host itself."""
        from lily.hosts.cpu import CpuHost

        if self._peer is None and isinstance(self.host, CpuHost):
            threads = 2 if self.host.threads == 1 else 1
            self._peer = CpuHost(threads=threads, libraries=self.registry.kernel_libraries(self.host.kind))
        return self._peer or self.host


def check_variant(
    variant: KernelVariant, host: Host, registry: Registry, *, cases: Iterable[Case] | None = None
) -> list[CaseResult]:
    """Check one variant: see :class:`Harness`."""
    harness = Harness(host, registry)
    try:
        return harness.check_variant(variant, cases)
    finally:
        harness.close()


def shipped_policies() -> list[Policy]:
    """Lily's own policies, by name; whether anyone provides the variants they name is not asked."""
    from lily.policy import Policy, available

    nobody = Registry()
    return [Policy.load(name, nobody) for name in available(nobody)]


def option_sets(variant: KernelVariant, case: Case) -> list[dict[str, object]]:
    """Choices of a variant's options to try on a case: all of them if they are few, else each one at least once."""
    choices: dict[str, tuple[object, ...]] = {name: option.choices for name, option in variant.options.items()}
    if case.op == "moe.experts_in" and "tile_rows" in choices and "tile_rows" in case.dims:
        # The block map is made for the tile of this very variant, see moe.group.
        choices["tile_rows"] = tuple(choice for choice in choices["tile_rows"] if choice == case.dims["tile_rows"])
    combined = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    if len(combined) <= FULL_PRODUCT:
        return combined
    default = {name: choices[name][0] if name == "tile_rows" else variant.options[name].default for name in choices}
    others = [(name, value) for name, values in choices.items() for value in values if value != default[name]]
    return [default, *({**default, name: value} for name, value in others)]


def never_applicable(variant: KernelVariant) -> CaseResult:
    """The result of a variant that accepts none of the cases: nothing has been shown, so it fails."""
    needs = f" (it needs {variant.requirement})" if variant.requirement else ""
    return failed("every case", {}, f"never applicable: it accepts none of the shapes tried{needs}")


def _fault(message: str) -> Finding:
    return Finding("", float("inf"), 0.0, message)


def failed(case: str, options: Mapping[str, object], message: str) -> CaseResult:
    """A result without a number."""
    return CaseResult(case, options, float("inf"), 0.0, False, message)
