"""Every case builds, the same each time; and the oracle passes its own values, stored as a perfect kernel would."""

from __future__ import annotations

import numpy as np
import pytest

from lily.checking.case import Case
from lily.checking.cases import cases_for
from lily.checking.expected import compare
from lily.checking.memory import POISON, array_of
from lily.checking.operands import build
from lily.checking.oracle import judge
from lily.checking.outcome import Outcome
from lily.checking.problem import Problem
from lily.ops import OPS, Tensor, Weight
from lily.reference import bfloat16_bits, experts_in, experts_out, route, shared_expert_in

LIGHT = 1 << 19  # largest product of dimensions of the cases that are tried here


def light(op: str) -> list[Case]:
    """A few small cases of an op, of both phases and every scenario."""
    chosen: dict[tuple[object, ...], Case] = {}
    for case in cases_for(op):
        if max(case.dims.values()) <= 1100 and case.dims.get("hidden", 0) <= 256:
            chosen.setdefault((case.phase, case.formats, case.cache_dtype, case.scenario), case)
    return list(chosen.values())


def perfect(problem: Problem) -> Outcome:
    """The outcome of a run that stored the oracle's values as well as they can be stored."""
    outcome = Outcome(problem, {slot.index: problem.memory.image(slot.index).copy() for slot in problem.memory.slots})
    for got, expected in judge(problem)(outcome):
        tensor = problem.op.operands.get(expected.role)
        if not isinstance(tensor, Tensor) or tensor.shape != got.shape:
            continue
        stored = array_of(outcome.images[tensor.view.slot.index], tensor)
        stored[...] = bfloat16_bits(expected.want) if tensor.dtype == "bf16" else expected.want
    return outcome


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("op", [op for op in OPS if op not in ("sample", "attention.prepare")])
def test_the_oracle_passes_its_own_values(op: str, dtype: str) -> None:
    for case in light(op):
        problem = build(case, activation_dtype=dtype)
        outcome = perfect(problem)
        findings = [compare(got, expected) for got, expected in judge(problem)(outcome)]
        assert all(finding.share <= 0.51 for finding in findings), (case.name, findings)


@pytest.mark.parametrize("op", OPS)
def test_before_a_run_nothing_passes(op: str) -> None:
    case = light(op)[0]
    problem = build(case)
    before = Outcome(problem, {slot.index: problem.memory.image(slot.index) for slot in problem.memory.slots})
    assert any(not compare(got, expected).passed for got, expected in judge(problem)(before))


@pytest.mark.parametrize("op", OPS)
def test_a_case_is_the_same_every_time(op: str) -> None:
    case = light(op)[-1]
    one, two = build(case), build(case)
    assert one.op == two.op
    for slot in one.memory.slots:
        assert np.array_equal(one.memory.image(slot.index), two.memory.image(slot.index))


@pytest.mark.parametrize("op", OPS)
def test_operands_are_fenced(op: str) -> None:
    problem = build(light(op)[0])
    fence = np.frombuffer(POISON * 32, np.uint8)
    for operand in problem.op.operands.values():
        views = [operand.view] if isinstance(operand, Tensor) else [operand.weight, operand.scales, operand.biases]
        for view in (view for view in views if view.nbytes and view.slot.name != "weights"):
            image = problem.memory.image(view.slot.index)
            end = view.offset + view.nbytes
            assert np.array_equal(np.sort(image[end : end + 64]), np.sort(fence))


def test_names_are_unique() -> None:
    for op in OPS:
        names = [case.name for case in cases_for(op)]
        assert len(set(names)) == len(names), op


def dense(problem: Problem, role: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """A weight as it multiplies an identity matrix, [experts,] rows × cols."""
    from lily.checking.weights import project

    weight = problem.op.weight(role)
    assert isinstance(weight, Weight)
    identity = np.eye(weight.cols)
    stack = [project(problem.memory, identity, weight, expert)[0].T for expert in range(max(weight.experts, 1))]
    return np.stack(stack) if weight.experts else stack[0]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_experts_are_those_of_the_whole_model_oracle(phase: str) -> None:
    """The harness takes experts one by one for their error bounds; the values must be those of lily.reference."""
    cases = [case for case in light("moe.experts_in") if case.phase == phase]
    for case in cases[:3]:
        problem = build(case)
        want = {expected.role: expected.want for _, expected in judge(problem)(perfect(problem))}
        h, ids = problem.values("h"), problem.values("ids")
        act = experts_in(h, ids, dense(problem, "gate"), dense(problem, "up")).reshape(want["act"].shape)
        if phase == "prefill":
            act = act[problem.values("order")]
        assert np.allclose(want["act"], act, rtol=1e-12, atol=1e-12)
        shared = shared_expert_in(h, dense(problem, "shared_gate"), dense(problem, "shared_up"))
        assert np.allclose(want["shared_act"], shared, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_sums_of_experts_are_those_of_the_whole_model_oracle(phase: str) -> None:
    cases = [case for case in light("moe.experts_out") if case.phase == phase]
    for case in cases[:3]:
        problem = build(case)
        [(_, expected)] = judge(problem)(perfect(problem))
        act, ids, weights = (problem.values(role) for role in ("act", "ids", "weights"))
        if phase == "prefill":
            act = act[problem.values("inverse")]
        want = experts_out(
            act.reshape(*ids.shape, -1),
            ids,
            weights[:, :-1],
            dense(problem, "down"),
            problem.values("shared_act"),
            weights[:, -1],
            dense(problem, "shared_down"),
            problem.values("x"),
        )
        assert np.allclose(expected.want, want, rtol=1e-12, atol=1e-12)


def test_routes_are_those_of_the_whole_model_oracle() -> None:
    for case in light("moe.route")[:3]:
        problem = build(case)
        want = {expected.role: expected.want for _, expected in judge(problem)(perfect(problem))}
        ids, weights = route(want["h"], dense(problem, "gate"), problem.op.shape["top_k"])
        assert np.array_equal(want["ids"], ids)
        assert np.allclose(want["weights"][:, :-1], weights, rtol=1e-9)
