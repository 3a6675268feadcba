"""The whole model on the CPU host against other engines, other layouts of the same weights, and every other variant.

Logits of the bundled model reach 20 in size. In float32 with a float32 cache the engine differs from transformers and
MLX in float32 by about 5e-5; the tolerance of 1e-3 is the model specification's (§9).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import yaml

import lily
from lily.catalog import find_model
from lily.checkpoint import Checkpoint
from lily.config import load_config
from lily.engine import Engine, record_step
from lily.hosts.meta import MetaHost
from lily.hosts.opening import choose_policy, open_host
from lily.memory import KvPool
from lily.model import StepShape
from lily.op_table import OPS, Phase
from lily.ops import Op
from lily.policy import Choice, Policy, Workload
from lily.registry import Registry, default_registry
from lily.weights import abstract_weights, load_weights
from tests.checkpoints import mlx_tensors, random_model, save, tiny_config, write_demo_twin
from tests.fixtures import CONVERSATIONS, PEERS, Fixture
from tests.test_weights import LAYOUTS

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def engine() -> Iterator[lily.TextEngine]:
    opened = lily.load(max_context=1024)
    yield opened
    opened.close()


def greedy(engine: lily.TextEngine, prompt: list[int], count: int) -> list[int]:
    session = engine.session()
    try:
        return list(engine.generate(session, prompt, max_tokens=count))
    finally:
        session.close()


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_logits_equal_those_of_other_engines(engine: lily.TextEngine, conversation: str, peer: str) -> None:
    fixture = Fixture.load(conversation)
    logits = engine.logits(fixture.sequence.tolist())
    assert fixture.distance(peer, logits) < TOLERANCE
    assert np.array_equal(logits.argmax(axis=-1), fixture.argmax(peer))


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_two_hundred_greedy_tokens_equal_those_of_other_engines(engine: lily.TextEngine, conversation: str) -> None:
    fixture = Fixture.load(conversation)
    assert len(fixture.continuation) == 200
    assert greedy(engine, fixture.tokens.tolist(), 200) == fixture.continuation.tolist()


def test_the_hugging_face_twin_gives_the_same_up_to_its_gates(engine: lily.TextEngine, tmp_path: Path) -> None:
    """The twin holds the 4-bit weights exactly, but its router gates and in_proj_a/b are bf16, not 8-bit."""
    twin = lily.load(write_demo_twin(tmp_path / "twin"), max_context=1024)
    fixture = Fixture.load("story")
    ours, theirs = engine.logits(fixture.sequence.tolist()), twin.logits(fixture.sequence.tolist())
    # An 8-bit gate is within 2^-8 of a bf16 one, which may swap experts whose scores are that close.
    assert np.median(np.abs(ours - theirs).max(axis=-1)) < 0.25
    assert (ours.argmax(axis=-1) == theirs.argmax(axis=-1)).mean() > 0.97
    assert greedy(twin, fixture.tokens.tolist(), 40) == fixture.continuation.tolist()[:40]
    twin.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_24_every_layout_of_the_same_weights_gives_the_same_logits(tmp_path: Path, layout: str) -> None:
    """Packed, bf16, f16 and f32; MLX's and Hugging Face's; experts stacked or apart: the values are exact in all."""
    config = tiny_config(head_dim=128, linear_value_head_dim=16)
    model = random_model(config)
    save(tmp_path / "mlx", config, mlx_tensors(model))
    given, tensors = LAYOUTS[layout]
    quantization = {key: given[key] for key in ("quantization",) if key in given}
    save(
        tmp_path / "other",
        {"text_config": config["text_config"], **quantization, "model_type": config["model_type"]},
        tensors(model),
    )
    expected = _logits(tmp_path / "mlx")
    # Sums in another order, in float32.
    assert np.abs(_logits(tmp_path / "other") - expected).max() < 1e-5 * np.abs(expected).max()


def _logits(directory: Path) -> np.ndarray:
    """Logits of a checkpoint that has no tokenizer."""
    registry = default_registry()
    policy = choose_policy("auto", "cpu", registry)
    weights = load_weights(Checkpoint.open(directory), load_config(directory))
    engine = Engine(weights, open_host("cpu", policy, registry), policy, registry, max_context=128)
    logits = engine.logits([1, 5, 9, 2, 7, 3, 3, 8] * 5)
    engine.close()
    return logits


def _experiments() -> list[tuple[str, Phase, str, dict[str, int | str]]]:
    """Every CPU variant of every op with each of its options, where it accepts the bundled model's ops."""
    registry = default_registry()
    policy = Policy.load("cpu", registry)
    weights = abstract_weights(load_config(find_model("demo").path))
    ops: list[Op] = []
    for shape in (StepShape("decode", 1, 1, "sample"), StepShape("prefill", 60, 1, "sample")):
        host = MetaHost()
        pool = KvPool(host, weights.config, 1024, "f32")

        class Watching(Policy):
            def choose(self, work: Op | Workload, host: str, registry: Registry) -> Choice:
                assert isinstance(work, Op)
                ops.append(work)
                return super().choose(work, host, registry)

        watching = Watching(**{field.name: getattr(policy, field.name) for field in fields(policy)})
        record_step(weights, host, watching, registry, shape, pool, 1024)
    found = []
    for variant in registry.variants(host="cpu", plugin="lily_builtin"):
        names = list(variant.options)
        choices = [{}] if not names else [{names[0]: choice} for choice in variant.options[names[0]].choices]
        for phase in OPS[variant.op].phases:
            if all(variant.accepts(op) for op in ops if op.name == variant.op and op.phase == phase):
                found += [(variant.op, phase, variant.name, options) for options in choices]
    return found


@pytest.mark.parametrize(("op", "phase", "variant", "options"), _experiments())
def test_every_variant_writes_the_same_text(
    engine: lily.TextEngine, op: str, phase: Phase, variant: str, options: dict[str, int | str], tmp_path: Path
) -> None:
    """A policy that uses another variant for one op in one phase: same greedy tokens, logits within rounding."""
    rules: list[dict[str, object]] = [{"when": {"phase": phase}, "use": variant, "with": options}]
    for other in set(OPS[op].phases) - {phase}:
        for rule in Policy.load("cpu", default_registry()).rules(op):
            when = {key: condition.written for key, condition in rule.when.items()}
            if when.pop("phase", other) != other:
                continue
            kept = {key: list(value) if isinstance(value, tuple) else value for key, value in when.items()}
            rules.append({"when": {"phase": other, **kept}, "use": rule.use, "with": dict(rule.options)})
            if not kept:
                break
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "extends": "cpu.yaml", "kernels": {op: rules}}))
    other_engine = lily.load(policy=str(path), max_context=1024)
    fixture = Fixture.load("addition")
    tokens = fixture.sequence.tolist()[:70]
    logits = other_engine.logits(tokens)
    text = greedy(other_engine, fixture.tokens.tolist()[:60], 20)
    other_engine.close()
    assert np.abs(logits - engine.logits(tokens)).max() < TOLERANCE
    assert text == greedy(engine, fixture.tokens.tolist()[:60], 20)


def test_there_is_a_choice_in_every_fused_chain() -> None:
    """The four chains of the design each have a fused and a split form here, and the two attention packings exist."""
    names = {(op, variant) for op, _, variant, _ in _experiments()}
    for op in ("moe.experts_in", "moe.experts_out"):
        assert {(op, "gemv_fused"), (op, "gemv_split"), (op, "grouped")} <= names
    assert {("attention.prepare", "fused"), ("attention.prepare", "split")} <= names
    assert {("deltanet.step", "fused"), ("deltanet.step", "split")} <= names
    assert {("deltanet.scan", "direct"), ("deltanet.scan", "blockwise")} <= names
    assert {("attention.decode", name) for name in ("general", "gqa_packed", "fixed_block")} <= names
    assert {("moe.route", "host_routed"), ("moe.group", "host_routed")} <= names
