"""Problems are built once while there is room, and anew after they were spoilt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lily.checking.case import Case
from lily.checking.problem_cache import ProblemCache
from lily.checking.weights import F32
from lily.hosts.base import Host
from lily.hosts.cpu import CpuHost
from lily.hosts.meta import MetaHost

CASES = [Case("linear", "decode", {"rows": 1, "in_features": 64, "out0": n}, (F32,)) for n in (8, 16, 32)]


@pytest.fixture
def host() -> Iterator[Host]:
    host = CpuHost(threads=1)
    yield host
    host.close()


def test_a_problem_and_its_oracle_are_made_once(host: Host) -> None:
    cache = ProblemCache()
    problem = cache.problem(CASES[0], host)
    assert cache.problem(CASES[0], host) is problem
    assert cache.oracle(problem) is cache.oracle(problem)


def test_the_oldest_goes_when_there_is_no_room(host: Host) -> None:
    sizes = [ProblemCache().problem(case, host).memory.nbytes for case in CASES]
    cache = ProblemCache(nbytes=sizes[1] + sizes[2])
    first, second, _ = (cache.problem(case, host) for case in CASES)
    assert cache.problem(CASES[1], host) is second
    assert cache.problem(CASES[0], host) is not first


def test_a_problem_larger_than_the_room_is_built_all_the_same(host: Host) -> None:
    cache = ProblemCache(nbytes=1)
    assert cache.problem(CASES[0], host).op.name == "linear"


def test_a_forgotten_problem_is_built_anew(host: Host) -> None:
    cache = ProblemCache()
    problem = cache.problem(CASES[0], host)
    cache.forget(CASES[0])
    assert cache.problem(CASES[0], host) is not problem


def test_hosts_with_other_activations_get_other_problems(host: Host) -> None:
    cache = ProblemCache()
    narrow = cache.problem(CASES[0], MetaHost(kind="metal", activation_dtype="bf16"))
    assert narrow is not cache.problem(CASES[0], host)
    assert narrow.op.tensor("x").dtype == "bf16"
