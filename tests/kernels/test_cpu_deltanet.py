"""CPU kernels of Gated DeltaNet against the float64 oracle, and against each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lily_builtin.cpu_deltanet import VARIANTS

from lily.checking import Case, Harness
from lily.hosts.cpu import CpuHost
from lily.ops import Tensor
from lily.reference import deltanet_recurrence, gated_norm
from lily.registry import KernelVariant, Registry
from tests.kernels.workbench import ISAS, Workbench, named, phase_of

EPS = 1e-6
DEMO = {"key_heads": 2, "value_heads": 4, "head_dim": 128}
REAL = {"key_heads": 16, "value_heads": 32, "head_dim": 128}
NARROW = {"key_heads": 2, "value_heads": 6, "head_dim": 16}
ROWS = (1, 2, 7, 63, 64, 65, 130)

STEP = named(VARIANTS, "deltanet.step", "fused")
PREPARE = named(VARIANTS, "deltanet.prepare", "by_head")
SCANS = [
    (named(VARIANTS, "deltanet.scan", "direct"), {}),
    (named(VARIANTS, "deltanet.scan", "blockwise"), {"block": 32}),
    (named(VARIANTS, "deltanet.scan", "blockwise"), {"block": 64}),
]
SCAN_NAMES = ["direct", "blockwise-32", "blockwise-64"]


def cases(op: str) -> list[Case]:
    if op == "deltanet.step":
        return [Case(op, "decode", {"rows": 1, **dims}) for dims in (DEMO, REAL, NARROW)]
    table = [Case(op, "prefill", {"rows": rows, **DEMO}) for rows in ROWS]
    table += [Case(op, "prefill", {"rows": rows, **NARROW}) for rows in (3, 33)]
    # The real layer once: in float64, the oracle of more rows takes seconds.
    table.append(Case(op, "prefill", {"rows": 34, **REAL}))
    if op == "deltanet.scan":
        table.append(Case(op, "prefill", {"rows": 70, **DEMO}, scenario="forgetful"))
    return table


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


class Layer:
    """One DeltaNet layer's state on a workbench, fed with projections of a sequence."""

    def __init__(self, bench: Workbench, dims: dict[str, int], seed: int = 7) -> None:
        self.bench, self.dims = bench, dims
        self.rng = np.random.default_rng(seed)
        values, dim = dims["value_heads"], dims["head_dim"]
        self.channels = (2 * dims["key_heads"] + values) * dim
        self.conv_state = bench.tensor(np.zeros((3, self.channels)))
        self.state = bench.tensor(np.zeros((values, dim, dim)))
        self.fixed = {
            "conv_weight": bench.tensor(self.rng.normal(0, 0.5, (self.channels, 4))),
            # Decays from nearly 1 to nearly 0, as trained models have.
            "A_log": bench.tensor(np.log(np.linspace(0.05, 16.0, values))),
            "dt_bias": bench.tensor(self.rng.normal(-2, 1, values)),
        }
        self.norm = bench.tensor(1 + self.rng.normal(0, 0.2, dim))

    def draw(self, rows: int) -> dict[str, Any]:
        values, dim = self.dims["value_heads"], self.dims["head_dim"]
        return {
            "qkv": self.rng.normal(size=(rows, self.channels)),
            "a": self.rng.normal(0, 2, (rows, values)),
            "b": self.rng.normal(0, 1.5, (rows, values)),
            "z": self.rng.normal(size=(rows, values, dim)),
        }

    def advance(self, inputs: dict[str, Any], recurrence: KernelVariant, **options: object) -> Any:
        """Prepare and recur over some rows; the layer's output [rows, value_heads · head_dim]."""
        rows = len(inputs["a"])
        keys, values, dim = (self.dims[key] for key in ("key_heads", "value_heads", "head_dim"))
        phase = phase_of(recurrence.op)
        shape = {"rows": rows, **self.dims}
        between = {
            **{role: self.bench.empty(rows, keys, dim) for role in ("q", "k")},
            "v": self.bench.empty(rows, values, dim),
            **{role: self.bench.empty(rows, values) for role in ("decay", "beta")},
        }
        given = {role: self.bench.tensor(inputs[role]) for role in ("qkv", "a", "b")}
        self.bench.run(PREPARE, phase, shape, {**given, **between, **self.fixed, "conv_state": self.conv_state})
        y = self.bench.empty(rows, values * dim)
        operands: dict[str, Tensor] = {
            **between,
            "z": self.bench.tensor(inputs["z"]),
            "norm": self.norm,
            "state": self.state,
            "y": y,
        }
        self.bench.run(recurrence, phase, shape, operands, {"eps": EPS}, **options)
        return self.bench.read(y)


@pytest.mark.parametrize("chunk", [1, 7, 64, 70])
@pytest.mark.parametrize(("scan", "options"), SCANS, ids=SCAN_NAMES)
def test_chunks_equal_steps(bench: Workbench, scan: KernelVariant, options: dict[str, object], chunk: int) -> None:
    """The state after 70 tokens to 1e-5, and every output: what chunked prefill may change are roundings."""
    rows = 70
    stepped, chunked = Layer(bench, NARROW), Layer(bench, NARROW)
    inputs = stepped.draw(rows)
    chunked.draw(rows)

    def part(first: int, count: int) -> dict[str, Any]:
        return {role: values[first : first + count] for role, values in inputs.items()}

    wanted = np.concatenate([stepped.advance(part(t, 1), STEP) for t in range(rows)])
    got = np.concatenate([chunked.advance(part(t, chunk), scan, **options) for t in range(0, rows, chunk)])
    assert np.array_equal(bench.read(chunked.conv_state), bench.read(stepped.conv_state))
    np.testing.assert_allclose(bench.read(chunked.state), bench.read(stepped.state), rtol=0, atol=1e-5)
    # The norm after the recurrence divides by an output's length, which may be small: 1e-4 there.
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


def test_step_variants_have_the_same_bits(bench: Workbench) -> None:
    """Where the norm is computed does not change it."""
    split = named(VARIANTS, "deltanet.step", "split")
    layers = [Layer(bench, DEMO), Layer(bench, DEMO)]
    for _ in range(3):
        outputs = [layer.advance(layer.draw(1), variant) for layer, variant in zip(layers, (STEP, split), strict=True)]
        assert np.array_equal(*outputs)
    assert np.array_equal(bench.read(layers[0].state), bench.read(layers[1].state))


@pytest.mark.parametrize(("scan", "options"), SCANS, ids=SCAN_NAMES)
def test_four_thousand_tokens_stay_finite(bench: Workbench, scan: KernelVariant, options: dict[str, object]) -> None:
    """After 4,000 tokens the state is that of the oracle, to float32 rounding, and decays underflow to zero cleanly."""
    layer = Layer(bench, NARROW)
    keys, values, dim = (NARROW[key] for key in ("key_heads", "value_heads", "head_dim"))
    rng, rows = np.random.default_rng(3), 4000
    q, k = (rng.normal(size=(rows, keys, dim)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(rows, values, dim))
    # Heads that forget at once, hardly, and never.
    decay = np.broadcast_to([1e-30, 0.0, 0.5, 0.9, 0.999, 1.0], (rows, values))
    beta, z = rng.random((rows, values)), rng.normal(size=(rows, values, dim))
    given = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "z": z}
    y = bench.empty(rows, values * dim)
    operands = {role: bench.tensor(array) for role, array in given.items()}
    fixed = {"norm": layer.norm, "state": layer.state, "y": y}
    bench.run(scan, "prefill", {"rows": rows, **NARROW}, {**operands, **fixed}, {"eps": EPS}, **options)
    o, state = deltanet_recurrence(q, k, v, decay, beta, np.zeros((values, dim, dim)))
    assert np.isfinite(bench.read(y)).all()
    np.testing.assert_allclose(bench.read(layer.state), state, rtol=0, atol=1e-5 * np.abs(state).max())
    wanted = gated_norm(o, z, bench.read(layer.norm), EPS).reshape(rows, -1)
    np.testing.assert_allclose(bench.read(y), wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_four_thousand_steps_of_silence_stay_finite(bench: Workbench) -> None:
    """A state that only decays ends at zero, and its norm is not one of 0 by 0."""
    layer = Layer(bench, NARROW)
    values, dim = NARROW["value_heads"], NARROW["head_dim"]
    bench.write(layer.state, np.random.default_rng(1).normal(size=(values, dim, dim)))
    rows = 4000
    silent = {"q": np.zeros((rows, 2, dim)), "k": np.zeros((rows, 2, dim)), "v": np.zeros((rows, values, dim))}
    gates = {"decay": np.full((rows, values), 0.95), "beta": np.full((rows, values), 0.5)}
    operands = {role: bench.tensor(array) for role, array in {**silent, **gates}.items()}
    y = bench.empty(rows, values * dim)
    fixed = {"z": bench.tensor(np.ones((rows, values, dim))), "norm": layer.norm, "state": layer.state, "y": y}
    bench.run(SCANS[0][0], "prefill", {"rows": rows, **NARROW}, {**operands, **fixed}, {"eps": EPS})
    assert np.abs(bench.read(layer.state)).max() < 1e-37
    assert (bench.read(y) == 0).all()


@pytest.mark.parametrize("dims", [{**DEMO, "head_dim": 24}, {**DEMO, "head_dim": 512}, {**DEMO, "value_heads": 3}])
def test_shapes_that_do_not_fit_are_refused(dims: dict[str, int]) -> None:
    from tests.variants import make_op

    for variant in VARIANTS:
        assert not variant.accepts(make_op(variant.op, phase_of(variant.op), **dims))
        assert "head size" in variant.requirement
