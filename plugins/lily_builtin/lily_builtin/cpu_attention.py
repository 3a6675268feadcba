"""CPU variants of gated full attention: prepare, decode in three layouts, prefill (model_spec §5)."""

from __future__ import annotations

import math
import struct

from lily.ops import Op, Tensor
from lily.plan import Access, Plan, read, update, write
from lily.registry import KernelVariant, Option

__all__ = ["VARIANTS"]

LANES = 16
"""The widest vector of any instruction set: heads are whole vectors of it."""
FLOAT = 4
DECODE_KEYS = 32
"""``kKeys`` of kernels/cpu/attention_decode.cc: keys a block."""
PREFILL_KEYS = 64
"""``kKeys`` of kernels/cpu/attention_prefill.cc."""
PIECE_EXTRA = 16
"""``Pieces::kExtra`` of kernels/cpu/attention_decode.cc."""
MAX_ROTARY = 256
"""``kMaxRotary`` of kernels/cpu/attention_prepare.cc."""
QUERY_LINES = 64
"""Lines (tokens × query heads of a group) of a query block in prefill: with the key block they fill a 512 KiB cache."""

HEAD = f"a head size that is a multiple of {LANES}"


def whole_vectors(op: Op) -> bool:
    """Whether heads are whole vectors."""
    return op.shape["head_dim"] % LANES == 0


def rotary_fits(op: Op) -> bool:
    """Whether both halves of the rotated dimensions are whole vectors too."""
    rotary = int(op.params["rotary_dim"])
    return whole_vectors(op) and rotary % (2 * LANES) == 0 and rotary <= min(op.shape["head_dim"], MAX_ROTARY)


def encode_prepare_fused(op: Op, plan: Plan) -> None:
    """One dispatch; a task is one row with all its heads, so that its angles are computed once."""
    plan.dispatch(
        f"attention_prepare_{_cache_dtype(op)}",
        [
            *(read(op.tensor(role).view) for role in ("u", "k", "v", "q_norm", "k_norm")),
            *(write(op.tensor(role).view) for role in ("q", "gate")),
            *(read(op.tensor(role).view) for role in ("step", "pages")),
            *_cache_writes(op),
        ],
        constants=_prepare_constants(op),
        tasks=op.shape["rows"],
        threads=4,
        worker_bytes=_frequency_bytes(op) + op.shape["head_dim"] * FLOAT,
    )


def encode_prepare_split(op: Op, plan: Plan) -> None:
    """Three dispatches: norms and split, rotary embedding, cache write."""
    rows, constants = op.shape["rows"], _prepare_constants(op)
    keys = plan.scratch(op.tensor("k").size * FLOAT)
    plan.dispatch(
        "attention_prepare_norm",
        [
            *(read(op.tensor(role).view) for role in ("u", "k", "q_norm", "k_norm")),
            *(write(op.tensor(role).view) for role in ("q", "gate")),
            write(keys),
        ],
        constants=constants,
        tasks=rows,
        threads=4,
    )
    plan.dispatch(
        "attention_prepare_rotate",
        [update(op.tensor("q").view), update(keys), read(op.tensor("step").view)],
        constants=constants,
        tasks=rows,
        threads=4,
        worker_bytes=_frequency_bytes(op),
    )
    plan.dispatch(
        f"attention_prepare_write_{_cache_dtype(op)}",
        [read(keys), *(read(op.tensor(role).view) for role in ("v", "step", "pages")), *_cache_writes(op)],
        constants=constants,
        tasks=rows,
        threads=4,
    )


def encode_decode_general(op: Op, plan: Plan) -> None:
    """One dispatch; a task is one query head."""
    _decode(op, plan, 1)


def encode_decode_packed(op: Op, plan: Plan, heads: int) -> None:
    """One dispatch; a task is ``heads`` query heads of a group that read each cached row once."""
    _decode(op, plan, math.gcd(heads, op.shape["gqa_group"]))


def encode_decode_blocks(op: Op, plan: Plan, blocks: int) -> None:
    """Two dispatches: partial softmax sums of every block of the context, then their combination.

    The grid is blocks × key/value heads whatever the context is; where a block begins is worked out from the
    position when the plan runs.
    """
    heads, group, dim = op.shape["heads"], op.shape["gqa_group"], op.shape["head_dim"]
    pieces = plan.scratch(heads * blocks * (dim + PIECE_EXTRA) * FLOAT)
    constants = _decode_constants(op, group, blocks)
    plan.dispatch(
        f"attention_decode_block_{_cache_dtype(op)}",
        [*(read(op.tensor(role).view) for role in ("q", "step", "pages")), *_cache_reads(op), write(pieces)],
        constants=constants,
        tasks=heads // group * blocks,
        worker_bytes=_decode_bytes(op, group),
    )
    plan.dispatch(
        "attention_decode_combine",
        [read(pieces), read(op.tensor("gate").view), write(op.tensor("y").view)],
        constants=constants,
        tasks=heads,
        worker_bytes=dim * FLOAT,
    )


def encode_prefill_flash(op: Op, plan: Plan) -> None:
    """One dispatch; a task is a block of queries of all heads of a group. Worker scratch is O(block)."""
    rows, kv_heads, group, dim = (op.shape[key] for key in ("rows", "kv_heads", "gqa_group", "head_dim"))
    # Short chunks get smaller blocks, so that there are tasks for several threads.
    block_rows = max(1, min(QUERY_LINES // group, rows * kv_heads // 16))
    lines = block_rows * group
    padded_dim = -(-dim // (2 * LANES)) * 2 * LANES
    floats = 2 * lines * dim + lines * PREFILL_KEYS + PREFILL_KEYS * (dim + padded_dim) + 2 * (lines + LANES)
    plan.dispatch(
        f"attention_prefill_{_cache_dtype(op)}",
        [
            *(read(op.tensor(role).view) for role in ("q", "gate", "step", "pages")),
            *_cache_reads(op),
            write(op.tensor("y").view),
        ],
        constants=_cache_shape(op) + struct.pack("<3I", rows, op.shape["heads"], block_rows),
        tasks=-(-rows // block_rows) * kv_heads,
        worker_bytes=floats * FLOAT,
    )


def _decode(op: Op, plan: Plan, pack: int) -> None:
    plan.dispatch(
        f"attention_decode_{_cache_dtype(op)}",
        [
            *(read(op.tensor(role).view) for role in ("q", "gate", "step", "pages")),
            *_cache_reads(op),
            write(op.tensor("y").view),
        ],
        constants=_decode_constants(op, pack, 1),
        tasks=op.shape["heads"] // pack,
        worker_bytes=_decode_bytes(op, pack),
    )


def _decode_bytes(op: Op, pack: int) -> int:
    return pack * (2 * op.shape["head_dim"] + DECODE_KEYS) * FLOAT


def _decode_constants(op: Op, pack: int, blocks: int) -> bytes:
    return _cache_shape(op) + struct.pack("<3I", op.shape["heads"], pack, blocks)


def _prepare_constants(op: Op) -> bytes:
    rows, heads = op.shape["rows"], op.shape["heads"]
    rest = struct.pack("<3Ifd", rows, heads, int(op.params["rotary_dim"]), op.params["eps"], op.params["theta"])
    # CacheShape is five words; the double at the end stands on a multiple of eight.
    return _cache_shape(op) + rest[:16] + bytes(4) + rest[16:]


def _frequency_bytes(op: Op) -> int:
    return int(op.params["rotary_dim"]) // 2 * 8


def _cache(op: Op) -> tuple[Tensor, Tensor]:
    return op.tensor("k_cache"), op.tensor("v_cache")


def _cache_dtype(op: Op) -> str:
    return _cache(op)[0].dtype


def _cache_shape(op: Op) -> bytes:
    """``CacheShape`` of kernels/cpu/paged_cache.h."""
    pages, kv_heads, page_tokens, head_dim = op.tensor("k_cache").shape
    return struct.pack("<5I", pages, op.tensor("pages").size, page_tokens, kv_heads, head_dim)


def _moved(op: Op, tokens: int) -> int:
    """Bytes of keys (or values) of ``tokens`` tokens."""
    width = 2 if _cache_dtype(op) == "bf16" else FLOAT
    return tokens * op.shape["kv_heads"] * op.shape["head_dim"] * width


def _cache_reads(op: Op) -> list[Access]:
    return [read(tensor.view, min(tensor.view.nbytes, _moved(op, op.shape["context"]))) for tensor in _cache(op)]


def _cache_writes(op: Op) -> list[Access]:
    return [write(tensor.view, min(tensor.view.nbytes, _moved(op, op.shape["rows"]))) for tensor in _cache(op)]


VARIANTS: list[KernelVariant] = [
    KernelVariant(
        op="attention.prepare",
        name="fused",
        host="cpu",
        encode=encode_prepare_fused,
        summary="norms, rotary embedding, gate split and cache write in one dispatch",
        accepts=rotary_fits,
        requirement=f"{HEAD} and rotary dimensions that are a multiple of {2 * LANES}",
    ),
    KernelVariant(
        op="attention.prepare",
        name="split",
        host="cpu",
        encode=encode_prepare_split,
        summary="norms and gate split, then rotary embedding, then cache write",
        accepts=rotary_fits,
        requirement=f"{HEAD} and rotary dimensions that are a multiple of {2 * LANES}",
    ),
    KernelVariant(
        op="attention.decode",
        name="general",
        host="cpu",
        encode=encode_decode_general,
        summary="a task walks the context for one query head",
        accepts=whole_vectors,
        requirement=HEAD,
    ),
    KernelVariant(
        op="attention.decode",
        name="gqa_packed",
        host="cpu",
        encode=encode_decode_packed,
        summary="query heads that share a key/value head share its loads; bytes equal those of general",
        accepts=lambda op: whole_vectors(op) and op.shape["gqa_group"] % 2 == 0,
        requirement=f"{HEAD} and an even number of query heads a key/value head",
        options={"heads": Option(4, (2, 4, 8), "query heads a task, or the largest part of it that divides a group")},
    ),
    KernelVariant(
        op="attention.decode",
        name="fixed_block",
        host="cpu",
        encode=encode_decode_blocks,
        summary="the context cut into blocks that are combined afterwards",
        accepts=lambda op: op.shape["head_dim"] == 256 and op.shape["gqa_group"] == 8,
        requirement="head size 256 and groups of eight query heads",
        options={"blocks": Option(64, (32, 64, 128), "blocks the context is cut into")},
    ),
    KernelVariant(
        op="attention.prefill",
        name="flash",
        host="cpu",
        encode=encode_prefill_flash,
        summary="blocks of queries by blocks of keys in cache, with online softmax",
        accepts=whole_vectors,
        requirement=HEAD,
    ),
]
