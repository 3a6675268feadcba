"""What is tried for an op: its table, and both sides of each switch of the shipped policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lily.checking.case import Case, shape_of
from lily.checking.tables import DEMO_HEADS, SMALL_MOE, TABLES, attention_case
from lily.ops import OPS
from lily.policy.conditions import Ints

if TYPE_CHECKING:
    from lily.policy import Policy

__all__ = ["cases_for", "thresholds"]


def thresholds(policies: Iterable[Policy], op: str) -> dict[str, list[int]]:
    """For each shape key, the values from which a policy's choice for ``op`` may differ from that for one less."""
    edges: dict[str, set[int]] = {}
    for policy in policies:
        for rule in policy.rules(op):
            for key, condition in rule.when.items():
                if isinstance(condition.values, Ints):
                    edges.setdefault(key, set()).update(condition.values.edges)
    return {key: sorted(values) for key, values in sorted(edges.items())}


def cases_for(op: str, policies: Iterable[Policy] = ()) -> list[Case]:
    """The table of an op, and both sides of each switch of ``policies`` in rows, context and rows an expert."""
    cases = {case.name: case for case in TABLES[op]()}
    for key, edges in thresholds(policies, op).items():
        for case in (case for edge in edges for size in (edge - 1, edge) for case in _at(op, key, size)):
            cases.setdefault(case.name, case)
    return list(cases.values())


def _at(op: str, key: str, size: int) -> Iterator[Case]:
    """Small cases in which one shape key has a given value; none if the table has one, or if the key can't have it."""
    if size < 1 or any(shape_of(case).get(key) == size for case in TABLES[op]()):
        return
    if key == "context":
        rows = 1 if op == "attention.decode" else min(3, size)
        # Long caches are large, so one side of an even edge has this dtype and the other side that one.
        yield attention_case(OPS[op].phases[0], rows, size - rows, DEMO_HEADS, ("bf16", "f32")[size % 2])
    elif key == "gqa_group" and op != "attention.prepare":
        heads = {"heads": size, "kv_heads": 1, "head_dim": 64}
        rows = 1 if op == "attention.decode" else 3
        yield attention_case(OPS[op].phases[0], rows, 100, heads, "f32")
    elif key == "rows_per_expert":
        dims = {**SMALL_MOE, "experts": 4, "rows": 2 * size}
        for tile in (16, 32):
            yield Case(op, "prefill", {**dims, "tile_rows": tile})
    elif key == "rows":
        first = next(case for case in TABLES[op]() if case.phase == "prefill")
        yield Case(op, "prefill", {**first.dims, "rows": size}, first.formats, first.cache_dtype, first.scenario)
