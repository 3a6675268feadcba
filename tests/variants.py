"""A registry of variants that encode nothing, for tests of what policies choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from lily.ops import OPS, Op, Operand, Phase, Tensor
from lily.plan import Slot, SlotKind, View
from lily.registry import KernelVariant, Option, Registry

Options: TypeAlias = Mapping[str, tuple[int | str, ...]]
Table: TypeAlias = Mapping[str, Mapping[str, Options]]

TILES: Options = {"tile_rows": (32, 16)}
CPU: Table = {
    "embed": {"rows": {}},
    "linear": {"gemv": {}, "gemm": TILES},
    "deltanet.prepare": {"by_head": {}},
    "deltanet.step": {"fused": {}, "split": {}},
    "deltanet.scan": {"direct": {}, "blockwise": {"block": (64, 32)}},
    "attention.prepare": {"fused": {}, "split": {}},
    "attention.prefill": {"flash": {}},
    "attention.decode": {"general": {}, "gqa_packed": {"heads": (4, 2, 8)}, "fixed_block": {"blocks": (64, 32, 128)}},
    "moe.route": {"fused": {}, "split": {}, "host_routed": {}},
    "moe.group": {"device": {}, "host_routed": {}},
    "moe.experts_in": {"gemv_fused": {}, "gemv_split": {}, "grouped": TILES, "grouped_split": TILES},
    "moe.experts_out": {"gemv_fused": {}, "gemv_split": {}, "grouped": TILES, "grouped_split": TILES},
    "logits": {"gemv": {}, "gemm": TILES},
    "sample": {"device": {}},
}
LANES: Options = {"lanes": ("interleaved", "contiguous")}
FORM: Options = {"form": ("simdgroup", "tensor")}
GROUPED: Options = {**FORM, "tile_rows": (32, 16), "simdgroups": (4, 2)}
METAL: Table = {
    **CPU,
    "linear": {"gemv": LANES, "gemm": FORM},
    "attention.prefill": {"flash": FORM},
    "moe.experts_in": {"gemv_fused": LANES, "grouped": GROUPED},
    "moe.experts_out": {"gemv_fused": LANES, "grouped": GROUPED},
    "logits": {"gemv": LANES, "gemm": FORM},
}
"""Variants by op; for each option the choices, the default first."""


class Plugin:
    """Provides variants and policies."""

    def __init__(self, variants: Sequence[KernelVariant] = (), policies: Sequence[Path] = ()) -> None:
        self._variants = variants
        self._policies = policies

    def lily_variants(self) -> Sequence[KernelVariant]:
        return self._variants

    def lily_policies(self) -> Sequence[Path]:
        return self._policies


def _encode(op: Op, plan: object, **options: object) -> None:
    raise AssertionError("choosing a variant must not encode it")


def variants_of(host: str, table: Table) -> list[KernelVariant]:
    def accepts_groups_of_four(op: Op) -> bool:
        return op.shape["gqa_group"] % 4 == 0

    return [
        KernelVariant(
            op,
            name,
            host,
            _encode,
            summary=f"{op} by {name}",
            accepts=accepts_groups_of_four if name == "gqa_packed" else lambda op: True,
            requirement="groups of a multiple of four query heads" if name == "gqa_packed" else "",
            options={key: Option(choices[0], choices, key) for key, choices in options.items()},
        )
        for op, variants in table.items()
        for name, options in variants.items()
    ]


def registry(*hosts: str, policies: Sequence[Path] = ()) -> Registry:
    """A registry with variants for these hosts (cpu, metal), and a plugin's policies."""
    made = Registry()
    tables = {"cpu": CPU, "metal": METAL}
    for host in hosts:
        made.register(Plugin(variants_of(host, tables[host])), f"variants_{host}")
    made.register(Plugin(policies=policies), "some_policies")
    return made


def shape_of(op: str, **values: int) -> dict[str, int]:
    """A shape of an op: the values given, 1 for the other keys."""
    return {key: values.get(key, 1) for key in OPS[op].shape}


def make_op(name: str, phase: Phase, **values: int) -> Op:
    """An op over empty operands."""
    tensor = Tensor(View(Slot(0, SlotKind.SCRATCH, "scratch"), 0, 0), (0,))
    spec = OPS[name]
    operands: dict[str, Operand] = {role: tensor for role in spec.operands if not role.endswith("?")}
    return Op(name, phase, "layers.3.op", shape_of(name, **values), operands, dict.fromkeys(spec.params, 0.0))
