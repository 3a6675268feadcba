"""The counts behind ``lily plan``: against the sizes of model_spec §10, and against the plan they summarise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.catalog import find_model
from lily.chips import find_chip
from lily.config import ModelConfig, load_config, parse_config
from lily.errors import HostError, UsageError
from lily.ops import Op
from lily.plan import Plan, SlotKind, update
from lily.plan_report import PlanReport, plan_report, record, require_variants, step_shape
from lily.policy import Policy
from lily.registry import KernelVariant, Registry, default_registry
from lily.weights import abstract_weights
from tests.recording import recording_registry, recording_variants
from tests.variants import Plugin

BIG = "qwen3.6-35b-a3b"
M5MAX = find_chip("m5max")
BOTH = recording_registry("cpu", "metal")


def config_of(name: str) -> ModelConfig:
    return load_config(find_model(name).path)


def report_of(
    policy: str | Path, registry: Registry, *, phase: str = "decode", context: int | None = None, name: str = BIG
) -> PlanReport:
    config = config_of(name)
    chosen = Policy.load(policy, registry)
    shape = step_shape(config, name, chosen.execution.prefill_chunk, phase, None, context)  # type: ignore[arg-type]
    return plan_report(config, name, chosen, registry, shape, M5MAX)


@pytest.mark.parametrize("registry", [BOTH, pytest.param(None, id="builtin")])
@pytest.mark.parametrize("context", [1, 4096, 40_000, 262_144])
def test_a_token_of_the_35b_model_moves_what_the_specification_says(registry: Registry | None, context: int) -> None:
    report = report_of("cpu", registry or default_registry(), context=context)
    traffic = report.traffic
    # 1 %: the specification rounds to four digits and counts norms in bf16, which the engine binds in float32.
    assert traffic.read[SlotKind.WEIGHTS] == pytest.approx(1.670e9, rel=0.01)
    assert traffic.written[SlotKind.WEIGHTS] == 0
    recurrent = 30 * 32 * 128 * 128 * 4
    assert report.recurrent_state == (recurrent, recurrent)
    assert report.kv_dtype == "bf16"
    # The kernel may round a context up to the rows of a block.
    assert traffic.read[SlotKind.KV] == pytest.approx(20_480 * context, abs=20_480 * 64)
    assert traffic.read[SlotKind.KV] >= 20_480 * context
    assert traffic.written[SlotKind.KV] == 20_480
    assert report.checkpoint_bytes == 19_508_789_376


def test_the_ceiling_of_an_m5_max_is_about_340_tokens_a_second_at_short_context() -> None:
    report = report_of("m5max", BOTH, context=1)
    assert report.activation_dtype == "bf16"
    assert report.convolution_state == (30 * 3 * 8192 * 2, 30 * 3 * 8192 * 2)
    assert report.floor_s == pytest.approx(report.streamed_bytes / 614e9)
    assert report.ceiling_tok_s == pytest.approx(340, rel=0.01)


@pytest.mark.parametrize(("dtype", "row"), [("bf16", 20_480), ("f32", 40_960)])
def test_the_cache_counts_by_what_the_policy_stores(tmp_path: Path, dtype: str, row: int) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(f"version: 1\nextends: cpu\nexecution:\n  kv_dtype: {dtype}\n")
    report = report_of(file, BOTH, context=100)
    assert (report.traffic.read[SlotKind.KV], report.traffic.written[SlotKind.KV]) == (100 * row, row)


@pytest.mark.parametrize("name", [BIG, "demo"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("encoder", ["concurrent", "serial"])
def test_rows_add_up_to_the_plan(tmp_path: Path, name: str, phase: str, encoder: str) -> None:
    registry = default_registry()
    file = tmp_path / "mine.yaml"
    file.write_text(f"version: 1\nextends: cpu\nexecution:\n  encoder: {encoder}\n")
    policy = Policy.load(file, registry)
    config = config_of(name)
    report = report_of(file, registry, phase=phase, name=name)
    recorder, _, _ = record(abstract_weights(config), policy, registry, report.shape)
    plan = recorder.plan
    assert sum(row.count for row in report.ops) == len(plan.ops)
    assert sum(row.dispatches for row in report.ops) == len(plan.dispatches) == report.dispatches
    assert sum(row.stages for row in report.ops) == plan.stages == report.stages
    if encoder == "serial":
        assert report.stages == report.dispatches
    for kind in SlotKind:
        assert sum(row.traffic.read[kind] for row in report.ops) == plan.traffic().read[kind]
        assert sum(row.traffic.written[kind] for row in report.ops) == plan.traffic().written[kind]
    for row in report.ops:
        assert len(row.layers) in (0, row.count)
    assert sorted(i for row in report.ops if row.op == "moe.route" for i in row.layers) == list(
        range(config.num_hidden_layers)
    )


def test_layers_of_equal_shape_and_choice_are_one_row() -> None:
    report = report_of("cpu", BOTH)
    counts = {row.label: row.count for row in report.ops}
    assert counts["linear_attn.in_proj"] == 30
    assert counts["self_attn.decode"] == 10
    assert counts["mlp.experts_in"] == 40
    assert counts["lm_head"] == 1
    rows = {row.label: row for row in report.ops}
    assert rows["self_attn.decode"].layers == tuple(range(3, 40, 4))
    assert rows["lm_head"].layers == ()


def test_a_layer_that_is_stored_otherwise_is_a_row_of_its_own() -> None:
    stored = json.loads((find_model("demo").path / "config.json").read_text())
    stored["quantization"]["model.layers.1.linear_attn.out_proj"] = False
    config = parse_config(stored, "config.json")
    policy = Policy.load("cpu", BOTH)
    shape = step_shape(config, "demo", 512, "decode", None, None)
    report = plan_report(config, "demo", policy, BOTH, shape, M5MAX)
    rows = [row for row in report.ops if row.label == "linear_attn.out_proj"]
    assert len(rows) == 2
    assert [row.layers for row in rows if 1 in row.layers] == [(1,)]


def test_pauses_are_counted_and_do_not_split_rows(tmp_path: Path) -> None:
    file = tmp_path / "ablation.yaml"
    file.write_text("version: 1\nextends: cpu\nkernels:\n  moe.route:\n    - {use: host_routed}\n")
    report = report_of(file, default_registry())
    (route,) = (row for row in report.ops if row.op == "moe.route")
    assert (route.count, route.host_calls, report.host_calls) == (40, 40, 40)
    assert report_of("cpu", default_registry()).host_calls == 0


def test_the_context_decides_the_rule() -> None:
    chosen = {}
    for context in (32_767, 32_768):
        report = report_of("cpu", BOTH, context=context)
        chosen[context] = next(row for row in report.ops if row.op == "attention.decode")
    assert (chosen[32_767].variant, chosen[32_767].options) == ("gqa_packed", {"heads": 4})
    assert (chosen[32_768].variant, chosen[32_768].options) == ("fixed_block", {"blocks": 128})
    assert chosen[32_767].rule != chosen[32_768].rule


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_stages_and_pauses_add_up_whatever_variants_write(script: list[tuple[int, bool, bool]]) -> None:
    """Variants that write none, one or several dispatches, dependent or not, with and without a pause."""

    def encode(op: Op, plan: Plan, **options: object) -> None:
        dispatches, dependent, pause = script[len(plan.ops) % len(script)]
        for _ in range(dispatches):
            view = next(iter(op.operands.values())).view if dependent and op.has("x") else plan.scratch(64)  # type: ignore[union-attr]
            plan.dispatch("kernel", [update(view)], tasks=1)
        if pause:
            plan.host_call("pause", lambda memory: None, [])

    registry = Registry()
    registry.register(Plugin(recording_variants("cpu", encode)), "scripted")
    report = report_of("cpu", registry, name="demo")
    assert sum(row.dispatches for row in report.ops) == report.dispatches
    assert sum(row.stages for row in report.ops) == report.stages
    assert sum(row.host_calls for row in report.ops) == report.host_calls


def test_what_was_left_open_is_filled_in() -> None:
    config = config_of(BIG)
    assert step_shape(config, BIG, 512, "decode", None, None).context == 4096
    prefill = step_shape(config, BIG, 512, "prefill", None, None)
    assert (prefill.rows, prefill.context) == (512, 4096)
    assert step_shape(config, BIG, 512, "prefill", 9000, None).context == 9000
    assert step_shape(config, BIG, 512, "prefill", None, 100).rows == 100


@pytest.mark.parametrize(
    ("phase", "rows", "context", "message"),
    [
        ("decode", 4, None, "a decode step reads one token, so --rows can't be 4; for a chunk say --phase prefill"),
        ("decode", None, 262_145, "--context is 262,145, but qwen3.6-35b-a3b was made for 262,144 tokens"),
        ("prefill", 300_000, None, "--rows is 300,000, but qwen3.6-35b-a3b was made for 262,144 tokens"),
        ("prefill", 512, 100, "--rows is 512 but --context 100; the context counts the step's own tokens too"),
    ],
)
def test_numbers_that_do_not_go_together(phase: str, rows: int | None, context: int | None, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        step_shape(config_of(BIG), BIG, 512, phase, rows, context)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_step_larger_than_a_chunk_says_how_the_engine_would_cut_it() -> None:
    config, policy = config_of(BIG), Policy.load("cpu", BOTH)
    for rows, notes in ((512, 0), (513, 1)):
        shape = step_shape(config, BIG, policy.execution.prefill_chunk, "prefill", rows, None)
        assert len(plan_report(config, BIG, policy, BOTH, shape, M5MAX).notes) == notes


def test_missing_variants_are_named_with_what_would_work() -> None:
    cpu = recording_registry("cpu")
    with pytest.raises(HostError, match=r"needs embed/rows, .* and \d+ more for host metal, .*; policies for host cpu"):
        require_variants(Policy.load("m5max", cpu), cpu)
    nothing = Registry()
    with pytest.raises(HostError, match="no plugin here provides any variant"):
        require_variants(Policy.load("m5max", nothing), nothing)
    require_variants(Policy.load("cpu", cpu), cpu)


def test_a_variant_of_a_plugin_is_counted_under_its_own_name(tmp_path: Path) -> None:
    registry = recording_registry("cpu")
    mine = next(variant for variant in recording_variants("cpu") if variant.op == "embed")
    registry.register(Plugin([KernelVariant("embed", "mine", "cpu", mine.encode, "mine")]), "third_party")
    file = tmp_path / "mine.yaml"
    file.write_text("version: 1\nextends: cpu\nkernels:\n  embed:\n    - {use: mine}\n")
    first = report_of(file, registry).ops[0]
    assert (first.op, first.variant) == ("embed", "mine")
    assert first.rule == f"{file}:5"
