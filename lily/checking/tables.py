"""The shapes that are tried: for each op, both sides of every switch that a kernel may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lily.checking.case import Case
from lily.checking.samplers import SCENARIOS
from lily.checking.weights import BF16, F16, F32, Q4, Q8, WeightFormat
from lily.ops import Phase

__all__ = ["DEMO_HEADS", "SMALL_MOE", "TABLES", "attention_case"]

# Around vector widths (4, 8, 16), tile heights (16, 32), the convolution's taps, a page and a scan's block (64).
ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130)
FEW_ROWS = (1, 5, 33)

_G32, _G128 = 32, 128
FORMATS = (
    Q4,
    WeightFormat("q4", _G32),
    WeightFormat("q4", _G128),
    WeightFormat("q4", 64, "f32"),
    Q8,
    WeightFormat("q8", _G32),
    WeightFormat("q8", _G128),
    BF16,
    F16,
    F32,
)

# Per-layer shapes of the bundled model and of Qwen3.6-35B-A3B (model_spec §1).
DEMO_DELTA = {"key_heads": 2, "value_heads": 4, "head_dim": 128}
REAL_DELTA = {"key_heads": 16, "value_heads": 32, "head_dim": 128}
SMALL_DELTA = {"key_heads": 1, "value_heads": 3, "head_dim": 64}
DEMO_HEADS = {"heads": 8, "kv_heads": 1, "head_dim": 256}
REAL_HEADS = {"heads": 16, "kv_heads": 2, "head_dim": 256}
PLAIN_HEADS = {"heads": 3, "kv_heads": 3, "head_dim": 64}
DEMO_MOE = {"experts": 32, "top_k": 4, "hidden": 256, "expert_width": 64, "shared_width": 64}
REAL_MOE = {"experts": 256, "top_k": 8, "hidden": 2048, "expert_width": 512, "shared_width": 512}
SMALL_MOE = {"experts": 5, "top_k": 2, "hidden": 128, "expert_width": 128, "shared_width": 128}


def _both(rows: int) -> list[Phase]:
    return ["decode", "prefill"] if rows == 1 else ["prefill"]


def _embed() -> Iterator[Case]:
    for fmt in FORMATS:
        for rows in FEW_ROWS:
            for phase in _both(rows):
                yield Case("embed", phase, {"rows": rows, "vocab": 300, "hidden": 256}, (fmt,))
    yield Case("embed", "prefill", {"rows": 130, "vocab": 4096, "hidden": 256})
    yield Case("embed", "decode", {"rows": 1, "vocab": 1000, "hidden": 2048})


def _outs(*rows: int) -> dict[str, int]:
    return {f"out{i}": n for i, n in enumerate(rows)}


def _linear() -> Iterator[Case]:
    def case(
        phase: Phase, rows: int, cols: int, outs: Sequence[int], *formats: WeightFormat, scenario: str = ""
    ) -> Case:
        dims = {"rows": rows, "in_features": cols, **_outs(*outs)}
        return Case("linear", phase, dims, formats or (Q4,), scenario=scenario)

    for fmt in FORMATS:
        yield case("decode", 1, 384, (101,), fmt)
        yield case("decode", 1, 256, (64, 24), fmt, scenario="norm")
        for rows in (5, 33):
            yield case("prefill", rows, 384, (101,), fmt, scenario="residual" if rows == 5 else "norm")
    for rows in ROWS:
        yield case("prefill", rows, 256, (96, 33, 4), Q4, Q4, Q8, scenario="norm")
        yield case("prefill", rows, 128, (65,), Q4, scenario="residual")
    for outs, cols in (((1,), 64), ((1,), 128), ((3, 1), 64), ((16, 1, 2, 3), 192)):
        yield case("decode", 1, cols, outs)
        yield case("prefill", 6, cols, outs)
    mixed = (Q4, WeightFormat("q8", _G32), BF16, F32)
    yield case("decode", 1, 256, (40, 24, 9, 17), *mixed, scenario="norm")
    yield case("prefill", 19, 256, (40, 24, 9, 17), *mixed, scenario="norm")
    demo_delta, demo_attention = (1024, 512, 4, 4), (4096, 256, 256)
    for phase, rows in _one_and(20):
        yield case(phase, rows, 256, demo_delta, Q4, Q4, Q8, Q8, scenario="norm")
        yield case(phase, rows, 256, demo_attention, BF16, scenario="norm")
        yield case(phase, rows, 2048, (256,), scenario="residual")
    yield case("decode", 1, 2048, (8192, 4096, 32, 32), scenario="norm")
    yield case("decode", 1, 2048, (8192, 512, 512), scenario="norm")
    yield case("decode", 1, 4096, (2048,), scenario="residual")
    yield case("prefill", 18, 4096, (2048,), scenario="residual")


def _one_and(rows: int) -> list[tuple[Phase, int]]:
    return [("decode", 1), ("prefill", rows)]


def _deltanet_prepare() -> Iterator[Case]:
    for rows in sorted({*ROWS, 4, 5}):
        scenario = "start" if rows in (2, 7, 64) else ""
        for phase in _both(rows):
            yield Case("deltanet.prepare", phase, {"rows": rows, **DEMO_DELTA}, scenario=scenario)
    for phase, rows in _one_and(3):
        yield Case("deltanet.prepare", phase, {"rows": rows, **REAL_DELTA})
        yield Case("deltanet.prepare", phase, {"rows": rows, **SMALL_DELTA})


def _deltanet_step() -> Iterator[Case]:
    for dims in (DEMO_DELTA, SMALL_DELTA, REAL_DELTA):
        for scenario in ("", "start"):
            yield Case("deltanet.step", "decode", {"rows": 1, **dims}, scenario=scenario)


def _deltanet_scan() -> Iterator[Case]:
    for rows in ROWS:
        scenario = "start" if rows in (9, 64) else ""
        yield Case("deltanet.scan", "prefill", {"rows": rows, **DEMO_DELTA}, scenario=scenario)
    for rows in (127, 128, 129):
        yield Case("deltanet.scan", "prefill", {"rows": rows, **SMALL_DELTA})
    yield Case("deltanet.scan", "prefill", {"rows": 70, **DEMO_DELTA}, scenario="forgetful")
    yield Case("deltanet.scan", "prefill", {"rows": 66, **REAL_DELTA})


# Positions before the step: the start, page edges, far along.
POSITIONS = (0, 1, 62, 63, 64, 1000)


def _attention_prepare() -> Iterator[Case]:
    def case(phase: Phase, rows: int, position: int, heads: Mapping[str, int], cache: str) -> Case:
        dims = {"rows": rows, "position": position, **heads, "rotary_dim": max(heads["head_dim"] // 4, 32)}
        return Case("attention.prepare", phase, dims, cache_dtype=cache)

    for cache in ("f32", "bf16"):
        for position in POSITIONS:
            yield case("decode", 1, position, DEMO_HEADS, cache)
        yield case("decode", 1, 40_000, {"heads": 2, "kv_heads": 1, "head_dim": 128}, cache)
        for rows, position in ((1, 5), (2, 63), (7, 60), (64, 0), (65, 30), (130, 64)):
            yield case("prefill", rows, position, DEMO_HEADS, cache)
        for heads in (REAL_HEADS, PLAIN_HEADS):
            yield case("decode", 1, 77, heads, cache)
            yield case("prefill", 9, 60, heads, cache)


def attention_case(
    phase: Phase, rows: int, position: int, heads: Mapping[str, int], cache: str, *, scenario: str = ""
) -> Case:
    dims = {"rows": rows, "position": position, "context": position + rows, **heads}
    return Case(f"attention.{phase}", phase, dims, cache_dtype=cache, scenario=scenario)


def _attention_prefill() -> Iterator[Case]:
    for rows in ROWS:
        yield attention_case("prefill", rows, (0, 63, 100)[rows % 3], DEMO_HEADS, ("f32", "bf16")[rows % 2])
    for cache in ("f32", "bf16"):
        for position in POSITIONS:
            yield attention_case("prefill", 18, position, DEMO_HEADS, cache)
        yield attention_case("prefill", 18, 900, DEMO_HEADS, cache, scenario="peaked")
        yield attention_case("prefill", 20, 50, REAL_HEADS, cache)
        yield attention_case("prefill", 9, 60, PLAIN_HEADS, cache)


def _attention_decode() -> Iterator[Case]:
    for cache in ("f32", "bf16"):
        for position in (*POSITIONS, *((6, 8, 15, 127, 255, 512) if cache == "f32" else (7, 16, 128, 256, 511))):
            yield attention_case("decode", 1, position, DEMO_HEADS, cache)
        yield attention_case("decode", 1, 300, DEMO_HEADS, cache, scenario="peaked")
        for heads in (REAL_HEADS, PLAIN_HEADS, {"heads": 4, "kv_heads": 2, "head_dim": 128}):
            for position in (0, 63, 200):
                yield attention_case("decode", 1, position, heads, cache)
        # A plan serves a bucket of contexts: the shape says the most there may be, the step parameters what there is.
        for position in (0, 40, 129):
            dims = {"rows": 1, "position": position, "context": 1024, **DEMO_HEADS}
            yield Case("attention.decode", "decode", dims, cache_dtype=cache)


def _moe_route() -> Iterator[Case]:
    for rows in ROWS:
        for phase in _both(rows):
            yield Case("moe.route", phase, {"rows": rows, **DEMO_MOE}, (Q8,))
    for fmt in FORMATS:
        for phase, rows in _one_and(6):
            yield Case("moe.route", phase, {"rows": rows, **SMALL_MOE}, (fmt,))
    for phase, rows in _one_and(9):
        yield Case("moe.route", phase, {"rows": rows, **DEMO_MOE}, (Q8,), scenario="tied")
        yield Case("moe.route", phase, {"rows": rows, **REAL_MOE}, (Q8,))


def _moe_group() -> Iterator[Case]:
    for tile in (16, 32):
        for rows in (*ROWS, 257):
            yield Case("moe.group", "prefill", {"rows": rows, **DEMO_MOE, "tile_rows": tile})
        for scenario in ("skewed", "one-sided"):
            yield Case("moe.group", "prefill", {"rows": 130, **DEMO_MOE, "tile_rows": tile}, scenario=scenario)
        for rows in (1, 70, 600):
            yield Case("moe.group", "prefill", {"rows": rows, **REAL_MOE, "tile_rows": tile})


def _experts(op: str) -> Callable[[], Iterator[Case]]:
    def table() -> Iterator[Case]:
        for fmt in FORMATS:
            yield Case(op, "decode", {"rows": 1, **SMALL_MOE}, (fmt,))
            yield Case(op, "prefill", {"rows": 45, **SMALL_MOE, "tile_rows": 16}, (fmt,))
        yield Case(op, "decode", {"rows": 1, **DEMO_MOE})
        for tile in (16, 32):
            for rows in (1, 2, 9, 33, 130):
                yield Case(op, "prefill", {"rows": rows, **DEMO_MOE, "tile_rows": tile})
            yield Case(op, "prefill", {"rows": 67, **DEMO_MOE, "tile_rows": tile}, scenario="skewed")
            # Both experts that anyone chooses get every row: edges of a tile, and experts without rows between them.
            for rows in (1, 7, 8, 15, 16, 17, 31, 32, 33, 65):
                yield Case(op, "prefill", {"rows": rows, **SMALL_MOE, "tile_rows": tile}, scenario="one-sided")
        yield Case(op, "prefill", {"rows": 40, **DEMO_MOE, "tile_rows": 32}, (Q4, Q8, BF16))
        yield Case(op, "decode", {"rows": 1, **REAL_MOE})
        # In prefill the real matrices and the real number of experts come apart: together they take half a gigabyte.
        yield Case(op, "prefill", {"rows": 3, **REAL_MOE, "experts": 16, "tile_rows": 16}, scenario="one-sided")
        many = {"experts": 256, "top_k": 8, "hidden": 128, "expert_width": 64, "shared_width": 64}
        yield Case(op, "prefill", {"rows": 40, **many, "tile_rows": 16})

    return table


def _logits() -> Iterator[Case]:
    for fmt in FORMATS:
        for phase, rows in _one_and(5):
            yield Case("logits", phase, {"rows": rows, "vocab": 301, "hidden": 256}, (fmt,))
    for rows in (1, 2, 9, 33):
        yield Case("logits", "prefill", {"rows": rows, "vocab": 4096, "hidden": 256})
    for phase, rows in _one_and(4):
        yield Case("logits", phase, {"rows": rows, "vocab": 3000, "hidden": 2048})


DRAWS = 6  # of each setting that draws at random, with as many seeds


def _sample() -> Iterator[Case]:
    for scenario, sampler in SCENARIOS.items():
        for draw in range(1 if sampler.temperature == 0 else DRAWS):
            phase, advance = _one_and(17)[draw % 2]
            yield Case("sample", phase, {"vocab": 4096, "advance": advance, "draw": draw}, scenario=scenario)
    for vocab in (1, 7, 1000, 248_320):
        for scenario in ("greedy", "top-p"):
            yield Case("sample", "decode", {"vocab": vocab, "advance": 1}, scenario=scenario)


TABLES: Mapping[str, Callable[[], Iterator[Case]]] = {
    "embed": _embed,
    "linear": _linear,
    "deltanet.prepare": _deltanet_prepare,
    "deltanet.step": _deltanet_step,
    "deltanet.scan": _deltanet_scan,
    "attention.prepare": _attention_prepare,
    "attention.prefill": _attention_prefill,
    "attention.decode": _attention_decode,
    "moe.route": _moe_route,
    "moe.group": _moe_group,
    "moe.experts_in": _experts("moe.experts_in"),
    "moe.experts_out": _experts("moe.experts_out"),
    "logits": _logits,
    "sample": _sample,
}
