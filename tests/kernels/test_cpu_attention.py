"""CPU kernels of full attention against the float64 oracle, and against each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lily_builtin.cpu_attention import VARIANTS

from lily.checking import Case, Harness
from lily.hosts.cpu import CpuHost
from lily.ops import Tensor
from lily.reference import attention_prepare
from lily.registry import KernelVariant, Registry
from lily.step import PAGE_TOKENS, STEP_DTYPE
from tests.kernels.workbench import ISAS, Workbench, named, phase_of

DEMO = {"heads": 8, "kv_heads": 1, "head_dim": 256}
REAL = {"heads": 16, "kv_heads": 2, "head_dim": 256}
NARROW = {"heads": 4, "kv_heads": 2, "head_dim": 48}
ROWS = (1, 2, 7, 63, 64, 65, 130)
CONTEXTS = (1, 63, 64, 65, 1000, 4097)

GENERAL = named(VARIANTS, "attention.decode", "general")
PACKED = named(VARIANTS, "attention.decode", "gqa_packed")
BLOCKS = named(VARIANTS, "attention.decode", "fixed_block")
FLASH = named(VARIANTS, "attention.prefill", "flash")


def case(op: str, rows: int, position: int, heads: dict[str, int], cache: str) -> Case:
    dims = {"rows": rows, "position": position, "context": position + rows, **heads}
    if op == "attention.prepare":
        dims["rotary_dim"] = 32 if heads is NARROW else 64
    return Case(op, phase_of(op), dims, cache_dtype=cache)


def cases(op: str) -> list[Case]:
    kinds = ("f32", "bf16")
    if op == "attention.decode":
        table = [case(op, 1, context - 1, DEMO, kinds[i % 2]) for i, context in enumerate(CONTEXTS)]
        return [*table, case(op, 1, 200, REAL, "bf16"), case(op, 1, 40, NARROW, "f32")]
    table = [case(op, rows, (0, 63, 100)[i % 3], DEMO, kinds[i % 2]) for i, rows in enumerate(ROWS)]
    return [*table, case(op, 20, 50, REAL, "bf16"), case(op, 9, 60, NARROW, "f32")]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.op}-{v.name}")
def test_variants_meet_the_oracle(variant: KernelVariant, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the harness's tolerances; threads, barriers and leftovers in memory change no bit."""
    monkeypatch.setenv("LILY_CPU_ISA", isa)
    harness = Harness(CpuHost(threads=2), Registry(), policies=[])
    results = harness.check_variant(variant, cases(variant.op))
    harness.close()
    assert not [str(result) for result in results if not result.passed]


@pytest.fixture(params=ISAS)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    monkeypatch.setenv("LILY_CPU_ISA", request.param)
    workbench = Workbench()
    yield workbench
    workbench.close()


class Cache:
    """A paged cache of random rows, its pages in random order."""

    def __init__(self, bench: Workbench, heads: dict[str, int], tokens: int, dtype: str, filled: bool = True) -> None:
        rng = np.random.default_rng(tokens)
        pages = -(-tokens // PAGE_TOKENS)
        shape = (pages, heads["kv_heads"], PAGE_TOKENS, heads["head_dim"])
        self.bench, self.heads, self.order = bench, heads, rng.permutation(pages)
        self.step = bench.tensor(np.zeros(1, STEP_DTYPE).view(np.int32), "i32")
        content = [rng.normal(size=shape) if filled else np.full(shape, np.nan) for _ in range(2)]
        self.operands: dict[str, Tensor] = {
            "step": self.step,
            "pages": bench.tensor(self.order, "i32"),
            "k_cache": bench.tensor(content[0], dtype),
            "v_cache": bench.tensor(content[1], dtype),
        }

    def at(self, position: int) -> None:
        """Set the position of the next row."""
        step: Any = np.zeros(1, STEP_DTYPE)
        step["position"] = position
        self.bench.write(self.step, step.view(np.int32))

    def attend(self, variant: KernelVariant, q: Any, gate: Any, context: int, **options: object) -> Any:
        """The rows' attention; the cache must be ``at`` their first position."""
        y = self.bench.empty(len(q), self.heads["heads"] * self.heads["head_dim"])
        shape = {"rows": len(q), "context": context, **self.heads}
        shape["gqa_group"] = self.heads["heads"] // self.heads["kv_heads"]
        given = {"q": self.bench.tensor(q), "gate": self.bench.tensor(gate), "y": y}
        self.bench.run(variant, phase_of(variant.op), shape, {**given, **self.operands}, None, **options)
        return self.bench.read(y)


def queries(heads: dict[str, int], rows: int, scale: float = 1.0) -> tuple[Any, Any]:
    rng = np.random.default_rng(rows)
    shape = (rows, heads["heads"], heads["head_dim"])
    return rng.normal(size=shape) * scale, rng.normal(size=shape)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("heads", [DEMO, REAL, NARROW], ids=["demo", "real", "narrow"])
def test_packing_changes_no_bit(bench: Workbench, heads: dict[str, int], dtype: str) -> None:
    """2, 4 or 8 heads a task, over short and long contexts, and scores that are far apart."""
    cache = Cache(bench, heads, max(CONTEXTS), dtype)
    for context in CONTEXTS:
        q, gate = queries(heads, 1, scale=4.0 if context == 1000 else 1.0)
        cache.at(context - 1)
        wanted = cache.attend(GENERAL, q, gate, context)
        assert np.isfinite(wanted).all()
        for pack in (2, 4, 8):
            assert cache.attend(PACKED, q, gate, context, heads=pack).tobytes() == wanted.tobytes(), (context, pack)


@pytest.mark.parametrize("blocks", [32, 64, 128])
def test_blocks_agree_with_the_whole(bench: Workbench, blocks: int) -> None:
    """Cutting the context changes only roundings: 1e-6 of values that are about 1."""
    cache = Cache(bench, DEMO, max(CONTEXTS), "bf16")
    for context in CONTEXTS:
        q, gate = queries(DEMO, 1, scale=4.0 if context == 1000 else 1.0)
        cache.at(context - 1)
        wanted = cache.attend(GENERAL, q, gate, context)
        got = cache.attend(BLOCKS, q, gate, context, blocks=blocks)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("variant", "options"), [(GENERAL, {}), (PACKED, {"heads": 4}), (BLOCKS, {"blocks": 32})])
def test_a_plan_recorded_for_a_short_context_serves_long_ones(
    bench: Workbench, variant: KernelVariant, options: dict[str, object]
) -> None:
    """The context is read from the step parameters: the shape's is a lower bound for the policy alone."""
    cache = Cache(bench, DEMO, 1000, "f32")
    q, gate = queries(DEMO, 1)
    for context in (1, 64, 65, 1000):
        cache.at(context - 1)
        exact = cache.attend(variant, q, gate, context, **options)
        assert np.array_equal(cache.attend(variant, q, gate, 1, **options), exact)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("position", [0, 1, 63, 500])
def test_prefill_equals_decode_row_by_row(bench: Workbench, position: int, dtype: str) -> None:
    """Every row of a chunk sees exactly the positions up to its own."""
    rows = 21
    cache = Cache(bench, NARROW, position + rows, dtype)
    q, gate = queries(NARROW, rows)
    cache.at(position)
    chunk = cache.attend(FLASH, q, gate, position + rows)
    for t in range(rows):
        cache.at(position + t)
        alone = cache.attend(GENERAL, q[t : t + 1], gate[t : t + 1], position + t + 1)
        np.testing.assert_allclose(chunk[t : t + 1], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("sizes", [(1,) * 30, (7, 7, 7, 7, 2), (30,)])
def test_prefill_does_not_depend_on_the_chunk_size(bench: Workbench, sizes: tuple[int, ...]) -> None:
    """The chunks of one sequence, whole or in parts, to the roundings of other query blocks."""
    rows = sum(sizes)
    cache = Cache(bench, DEMO, 100 + rows, "f32")
    q, gate = queries(DEMO, rows)
    cache.at(100)
    wanted = cache.attend(FLASH, q, gate, 100 + rows)
    first = 0
    for size in sizes:
        cache.at(100 + first)
        part = cache.attend(FLASH, q[first : first + size], gate[first : first + size], 100 + first + size)
        np.testing.assert_allclose(part, wanted[first : first + size], rtol=0, atol=2e-6)
        first += size


@pytest.mark.parametrize("name", ["fused", "split"])
@pytest.mark.parametrize("position", [0, 63, 4_095, 32_767, 262_143])
def test_rotary_angles_are_right_at_every_position(bench: Workbench, name: str, position: int) -> None:
    """Angles are computed in double: at position 262,143 the error is that of a few float32 roundings, as at 0."""
    heads, theta, rotary = NARROW, 1e7, 32
    rng = np.random.default_rng(position)
    cache = Cache(bench, heads, PAGE_TOKENS, "f32", filled=False)
    # Every entry of the table is the one page there is, so a far position needs no far memory.
    cache.operands["pages"] = bench.tensor(np.zeros(262_144 // PAGE_TOKENS), "i32")
    cache.at(position)
    dim, kv_heads = heads["head_dim"], heads["kv_heads"]
    given = {
        "u": rng.normal(size=(1, heads["heads"], 2 * dim)),
        "k": rng.normal(size=(1, kv_heads, dim)),
        "v": rng.normal(size=(1, kv_heads, dim)),
        "q_norm": 1 + rng.normal(0, 0.2, dim),
        "k_norm": 1 + rng.normal(0, 0.2, dim),
    }
    inputs = {role: bench.tensor(values) for role, values in given.items()}
    q, gate = (bench.empty(1, heads["heads"], dim) for _ in range(2))
    variant = named(VARIANTS, "attention.prepare", name)
    params = {"eps": 1e-6, "theta": theta, "rotary_dim": rotary}
    bench.run(variant, "decode", {"rows": 1, **heads}, {**inputs, "q": q, "gate": gate, **cache.operands}, params)
    stored = {role: bench.read(inputs[role]) for role in given}
    wanted_q, wanted_gate, wanted_k = attention_prepare(
        stored["u"], stored["k"], stored["q_norm"], stored["k_norm"], [position], theta, rotary, 1e-6
    )
    # Components are up to about 4: two units in the last place.
    np.testing.assert_allclose(bench.read(q), wanted_q, rtol=0, atol=1e-6)
    assert np.array_equal(bench.read(gate), wanted_gate)
    written = bench.read(cache.operands["k_cache"])[0, :, position % PAGE_TOKENS]
    np.testing.assert_allclose(written, wanted_k[0], rtol=0, atol=1e-6)
    assert np.array_equal(bench.read(cache.operands["v_cache"])[0, :, position % PAGE_TOKENS], stored["v"][0])
    assert np.isnan(bench.read(cache.operands["k_cache"])).sum() == (PAGE_TOKENS - 1) * kv_heads * dim


def test_prepare_variants_have_the_same_bits(bench: Workbench) -> None:
    """Normed, turned and stored in one dispatch or in three, in a bfloat16 cache."""
    rng, rows, position = np.random.default_rng(0), 70, 30
    dim, kv_heads = REAL["head_dim"], REAL["kv_heads"]
    shapes = {"u": (rows, 16, 2 * dim), "k": (rows, kv_heads, dim), "v": (rows, kv_heads, dim)}
    inputs = {role: bench.tensor(rng.normal(size=shape)) for role, shape in shapes.items()}
    norms = {role: bench.tensor(1 + rng.normal(0, 0.2, dim)) for role in ("q_norm", "k_norm")}
    results = []
    for name in ("fused", "split"):
        cache = Cache(bench, REAL, position + rows, "bf16")
        cache.at(position)
        out = {role: bench.empty(rows, 16, dim) for role in ("q", "gate")}
        operands = {**inputs, **norms, **out, **cache.operands}
        params = {"eps": 1e-6, "theta": 1e7, "rotary_dim": 64}
        bench.run(named(VARIANTS, "attention.prepare", name), "prefill", {"rows": rows, **REAL}, operands, params)
        results.append([bench.read(operands[role]) for role in ("q", "gate", "k_cache", "v_cache")])
    assert all(np.array_equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["general", "gqa_packed", "fixed_block"])
def test_the_grid_does_not_depend_on_the_context(name: str) -> None:
    from lily.checking.operands import build
    from lily.checking.running import record

    def grids(position: int) -> list[tuple[int, int, int]]:
        problem = build(case("attention.decode", 1, position, DEMO, "f32"))
        return [
            dispatch.tasks
            for dispatch in record(named(VARIANTS, "attention.decode", name), problem, {}).plan.dispatches
        ]

    assert grids(3) == grids(1000)


def test_variants_say_what_they_need() -> None:
    from tests.variants import make_op

    odd = {"heads": 8, "kv_heads": 1, "head_dim": 40, "gqa_group": 8}
    for variant in VARIANTS:
        assert not variant.accepts(make_op(variant.op, phase_of(variant.op), **odd))
        assert "head size" in variant.requirement
    for head_dim, group, fits in ((256, 8, True), (256, 4, False), (128, 8, False)):
        op = make_op("attention.decode", "decode", heads=16, head_dim=head_dim, gqa_group=group)
        assert BLOCKS.accepts(op) is fits
    assert not PACKED.accepts(make_op("attention.decode", "decode", heads=3, head_dim=64, gqa_group=3))
