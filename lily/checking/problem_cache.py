"""Problems that were built and oracles that were evaluated, kept for the next variant of the same op."""

from __future__ import annotations

from lily.checking.case import Case
from lily.checking.operands import build
from lily.checking.oracle import judge
from lily.checking.outcome import Judge
from lily.checking.problem import Problem
from lily.hosts.base import Host

__all__ = ["ProblemCache"]


class ProblemCache:
    """Keeps the latest problems up to so many bytes of operands."""

    def __init__(self, nbytes: int = 512 << 20) -> None:
        self._nbytes = nbytes
        self._problems: dict[tuple[str, str, bool], Problem] = {}
        self._judges: dict[int, tuple[Problem, Judge]] = {}

    def problem(self, case: Case, host: Host) -> Problem:
        """A case's problem, with operands as this host has them."""
        # On the CPU weights are bound where a checkpoint's file is mapped, so they start at any byte.
        key = (case.name, host.activation_dtype, host.kind == "cpu")
        if key not in self._problems:
            problem = build(case, activation_dtype=host.activation_dtype, unaligned=key[2])
            while self._problems and self._total() + problem.memory.nbytes > self._nbytes:
                self._drop(next(iter(self._problems)))
            self._problems[key] = problem
        return self._problems[key]

    def oracle(self, problem: Problem) -> Judge:
        """What judges runs of a problem, evaluated when it is first asked for."""
        if id(problem) not in self._judges:
            self._judges[id(problem)] = problem, judge(problem)
        return self._judges[id(problem)][1]

    def forget(self, case: Case) -> None:
        """Drop a case: the next one that asks for it gets it built anew."""
        for key in [key for key in self._problems if key[0] == case.name]:
            self._drop(key)

    def _total(self) -> int:
        return sum(problem.memory.nbytes for problem in self._problems.values())

    def _drop(self, key: tuple[str, str, bool]) -> None:
        self._judges.pop(id(self._problems.pop(key)), None)
