"""Variants that encode every op as one dispatch with honest byte counts, for any kind of host.

They let tests record plans for a host whose kernels are not here, e.g. metal on a machine without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lily.hosts.base import Host
from lily.hosts.cpu import CpuHost
from lily.ops import OPS, Op, Tensor, Weight
from lily.plan import Access, Plan, View, read, update, write
from lily.policy import Execution
from lily.registry import HostFactory, KernelVariant, Option, Registry
from tests.variants import CPU, METAL, Plugin

__all__ = ["HostPlugin", "recording_registry", "recording_variants"]

TABLES = {"cpu": CPU, "metal": METAL}


def _experts(op: Op, weight: Weight) -> int:
    """How many matrices of a stack the step reads."""
    if not weight.experts:
        return 1
    return min(weight.experts, op.shape["rows"] * op.shape["top_k"])


def _weight(op: Op, role: str, weight: Weight) -> list[Access]:
    moved = weight.moved(_experts(op, weight))
    if role == "table":
        moved = weight.moved() * op.shape["rows"] // weight.rows
    return [read(weight.weight, moved), read(weight.scales, 0), read(weight.biases, 0)]


def _cache(op: Op, tensor: Tensor) -> Access:
    row = op.shape["kv_heads"] * op.shape["head_dim"] * (2 if tensor.dtype == "bf16" else 4)
    if op.name == "attention.prepare":
        return write(tensor.view, row * op.shape["rows"])
    return read(tensor.view, row * op.shape["context"])


def _access(view: View, says: str) -> Access:
    if "updated" in says:
        return update(view)
    return (write if says.startswith("out") else read)(view)


def _accesses(op: Op) -> list[Access]:
    spec = OPS[op.name]
    says = {role.rstrip("?"): text for role, text in spec.operands.items()}
    found: list[Access] = []
    for role, operand in op.operands.items():
        if isinstance(operand, Weight):
            found.extend(_weight(op, role, operand))
        elif role in ("k_cache", "v_cache"):
            found.append(_cache(op, operand))
        else:
            found.append(_access(operand.view, says[role]))
    return found


def encode(op: Op, plan: Plan, **options: object) -> None:
    """One dispatch for the whole op."""
    plan.dispatch(op.name, _accesses(op), tasks=1)


def recording_variants(host: str, encode: Callable[..., None] = encode) -> list[KernelVariant]:
    """A variant for every name that the shipped policies use."""
    return [
        KernelVariant(
            op,
            name,
            host,
            encode,
            summary=f"{op} in one dispatch",
            options={key: Option(choices[0], choices, key) for key, choices in options.items()},
        )
        for op, variants in TABLES[host].items()
        for name, options in variants.items()
    ]


class HostPlugin:
    """Provides kinds of host; ``reasons`` says why one of them can't be used."""

    def __init__(self, *names: str, reasons: Mapping[str, str] | None = None) -> None:
        self._names = names
        self._reasons = reasons or {}

    def lily_hosts(self) -> list[HostFactory]:
        def factory(name: str) -> HostFactory:
            return HostFactory(
                name,
                f"a {name}",
                "f32" if name == "cpu" else "bf16",
                lambda: self._reasons.get(name),
                lambda: {"host": name},
                _open,
            )

        return [factory(name) for name in self._names]


def _open(execution: Execution, libraries: Sequence[Path]) -> Host:
    return CpuHost(threads=1)


def recording_registry(*kinds: str, hosts: Sequence[str] = ("cpu",)) -> Registry:
    """A registry that holds them for some kinds of host, and hosts that can be opened."""
    made = Registry()
    for kind in kinds:
        made.register(Plugin(recording_variants(kind)), f"recording_{kind}")
    made.register(HostPlugin(*hosts), "hosts")
    return made
