"""Decode attention for the CPU: a task is a query head, and its sums are rescaled only when they must be."""

import struct
from pathlib import Path

from lily.ops import Op
from lily.plan import Plan, read, write
from lily.registry import KernelVariant, Option, hookimpl


def encode(op: Op, plan: Plan, slack: int) -> None:
    heads, kv_heads, head_dim = (op.shape[key] for key in ("heads", "kv_heads", "head_dim"))
    cache = op.tensor("k_cache")
    moved = op.shape["context"] * kv_heads * head_dim * (2 if cache.dtype == "bf16" else 4)
    inputs = [read(op.tensor(role).view) for role in ("q", "gate", "step", "pages")]
    caches = [read(op.tensor(role).view, moved) for role in ("k_cache", "v_cache")]
    plan.dispatch(
        f"example_lazy_rescale_{cache.dtype}",
        [*inputs, *caches, write(op.tensor("y").view)],
        constants=struct.pack("<5I", heads, kv_heads, head_dim, cache.shape[2], slack),
        tasks=heads,
    )


@hookimpl
def lily_variants() -> list[KernelVariant]:
    variant = KernelVariant(
        "attention.decode",
        "lazy_rescale",
        host="cpu",
        encode=encode,
        summary="one pass over the cache, sums rescaled only when they must be",
        accepts=lambda op: op.shape["head_dim"] % 8 == 0,
        requirement="a head size that is a multiple of 8",
        options={"slack": Option(8, (0, 4, 8), "nats by which a score may exceed the reference before a rescale")},
    )
    return [variant]


@hookimpl
def lily_kernel_libraries(host: str) -> list[Path]:
    return list(Path(__file__).parent.glob("kernels.*.so")) if host == "cpu" else []
