"""Reading ``config.json``: every accepted form gives one ModelConfig, everything else an error that names the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.catalog import find_model
from lily.config import ModelConfig, Quantization, canonical, load_config, parse_config
from lily.errors import ConfigError
from lily.weights import abstract_weights
from tests.checkpoints import DEMO, FULL_ATTENTION, LINEAR_ATTENTION, QUANTIZATION, flat, tiny_config


def parse(config: object) -> ModelConfig:
    return parse_config(config, "config.json")


def test_the_real_model() -> None:
    """The values of model_spec §1."""
    config = load_config(find_model("qwen3.6-35b-a3b").path)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (2048, 40, 248320)
    assert config.full_layers == tuple(range(3, 40, 4))
    assert len(config.linear_layers) == 30
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 2, 256)
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)
    assert (config.key_dim, config.value_dim, config.conv_dim) == (2048, 4096, 8192)
    assert (config.linear_conv_kernel_dim, config.value_heads_per_key_head) == (4, 2)
    assert (config.query_dim, config.kv_dim, config.gqa_group) == (4096, 512, 8)
    assert (config.num_experts, config.num_experts_per_tok) == (256, 8)
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (512, 512)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 262144)
    assert config.eos_token_ids == (248044,)
    assert not config.tie_word_embeddings
    quantization = config.quantization
    assert quantization is not None
    assert quantization.of("language_model.model.layers.39.mlp.gate") == (8, 64)
    assert quantization.of("language_model.model.layers.39.mlp.switch_mlp.gate_proj") == (4, 64)
    assert len(quantization.overrides) == 80


def test_the_demo_model_has_the_proportions_of_the_real_one() -> None:
    demo = load_config(DEMO)
    assert (demo.head_dim, demo.gqa_group, demo.rotary_dim) == (256, 8, 64)
    assert demo == load_config(DEMO / "config.json") == load_config(DEMO / "model.safetensors")


def test_case_24_nested_and_flat_are_the_same() -> None:
    config = tiny_config()
    assert parse(config) == parse(flat(config))
    text_only = {**flat(config), "model_type": "qwen3_5_moe_text"}
    assert parse(config) == parse(text_only)


def test_layer_types_follow_from_the_interval() -> None:
    config = tiny_config(num_hidden_layers=5, full_attention_interval=2)
    del config["text_config"]["layer_types"]
    linear, full = LINEAR_ATTENTION, FULL_ATTENTION
    assert parse(config).layer_types == (linear, full, linear, full, linear)


ROPE = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", **ROPE}},
        {"rope_parameters": None, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1], **ROPE}},
        {"rope_parameters": None, "rope_scaling": None, **ROPE},
        {"rope_parameters": {"rope_type": "default"}, **ROPE},
    ],
)
def test_rope_settings_in_each_place(change: dict[str, Any]) -> None:
    config = parse(tiny_config(**change))
    assert (config.rope_theta, config.rotary_dim) == (5e5, 8)


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [(7, None, (7,)), ([7, 9], 3, (7, 9)), (None, [5, 6], (5, 6)), (None, None, ()), (0, 3, (0,))],
)
def test_eos_token_ids(inner: object, outer: object, expected: tuple[int, ...]) -> None:
    config = tiny_config(eos_token_id=inner, outer={"eos_token_id": outer})
    assert parse(config).eos_token_ids == expected


@pytest.mark.parametrize(("inner", "outer", "tied"), [(True, None, True), (None, True, True), (None, None, False)])
def test_tied_embeddings_at_either_level(inner: object, outer: object, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=inner, outer={"tie_word_embeddings": outer})
    assert parse(config).tie_word_embeddings is tied


def test_absent_keys_that_have_one_answer_only() -> None:
    config = tiny_config()
    for key in ("hidden_act", "attention_bias", "attn_output_gate", "tie_word_embeddings"):
        del config["text_config"][key]
    assert parse(config) == parse(tiny_config())


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.", ""])
def test_case_24_quantization_overrides(key: str, prefix: str) -> None:
    settings_ = {
        **QUANTIZATION,
        f"{prefix}layers.0.mlp.gate": {"group_size": 64, "bits": 8},
        f"{prefix}layers.1.mlp.gate": False,
        f"{prefix}layers.1.self_attn.q_proj": True,
        "vision_tower.blocks.0.attn.qkv": False,
    }
    quantization = parse(tiny_config(quantization=None, outer={key: settings_})).quantization
    assert quantization is not None
    for asked in ("language_model.model.", "model.language_model.", "model.", ""):
        assert quantization.of(f"{asked}layers.0.mlp.gate") == (8, 64)
        assert quantization.of(f"{asked}layers.1.mlp.gate") is None
        assert quantization.of(f"{asked}layers.1.self_attn.q_proj") == (4, 32)
        assert quantization.of(f"{asked}lm_head") == (4, 32)


def test_the_first_name_with_an_override_wins() -> None:
    quantization = Quantization(4, 64, {"layers.0.a": (8, 32), "layers.0.b": None})
    assert quantization.of("layers.0.c", "layers.0.b", "layers.0.a") is None
    assert quantization.of("layers.0.a", "layers.0.b") == (8, 32)
    assert quantization.of("layers.0.c", "layers.0.d") == (4, 64)


def test_no_quantization() -> None:
    assert parse(tiny_config(quantization=None)).quantization is None


def test_canonical_names() -> None:
    assert canonical("language_model.lm_head") == canonical("lm_head") == "lm_head"
    assert canonical("model.norm.weight") == canonical("language_model.model.norm.weight") == "norm.weight"


INNER: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "qwen3_next"}, r'text_config\.model_type is "qwen3_next"; expected "qwen3_5_moe"'),
    ({"hidden_act": "gelu"}, r'text_config\.hidden_act is "gelu"; expected "silu"'),
    ({"attention_bias": True}, r"text_config\.attention_bias is true; expected false"),
    ({"attn_output_gate": False}, r"text_config\.attn_output_gate is false; expected true"),
    ({"norm_topk_prob": False}, r"text_config\.norm_topk_prob is false; expected true"),
    ({"mlp_only_layers": [0]}, r"text_config\.mlp_only_layers is \[0\]; expected \[\]"),
    ({"decoder_sparse_step": 2}, r"text_config\.decoder_sparse_step is 2; expected 1"),
    ({"hidden_size": "64"}, r'text_config\.hidden_size is "64"; expected an integer'),
    ({"hidden_size": 64.0}, r"text_config\.hidden_size is 64\.0; expected an integer"),
    ({"hidden_size": True}, r"text_config\.hidden_size is true; expected an integer"),
    ({"hidden_size": 0}, r"text_config\.hidden_size is 0; expected an integer from 1"),
    ({"vocab_size": -3}, r"text_config\.vocab_size is -3; expected an integer from 1"),
    ({"vocab_size": 2**40}, r"text_config\.vocab_size is 1099511627776; expected an integer from 1 to"),
    ({"linear_conv_kernel_dim": 1}, r"text_config\.linear_conv_kernel_dim is 1; expected an integer from 2"),
    ({"num_experts_per_tok": 5}, r"text_config\.num_experts_per_tok is 5; expected an integer from 1 to 4"),
    ({"num_attention_heads": 3}, r"num_attention_heads is 3; expected a multiple of .*num_key_value_heads, .* 2"),
    ({"linear_num_value_heads": 5}, r"linear_num_value_heads is 5; expected a multiple of .*key_heads, .* 2"),
    ({"rms_norm_eps": 0}, r"text_config\.rms_norm_eps is 0; expected a positive number"),
    ({"rms_norm_eps": float("nan")}, r"text_config\.rms_norm_eps is NaN; expected a positive number"),
    ({"rms_norm_eps": "1e-6"}, r'text_config\.rms_norm_eps is "1e-6"; expected a positive number'),
    ({"layer_types": [LINEAR_ATTENTION]}, r"text_config\.layer_types is .*; expected .* each of the 2 layers"),
    ({"layer_types": LINEAR_ATTENTION}, r"text_config\.layer_types is .*; expected a list"),
    ({"layer_types": [LINEAR_ATTENTION, "mamba"]}, r'layer_types\[1\] is "mamba"; expected linear_attention or full'),
    ({"layer_types": None}, r"text_config\.full_attention_interval is missing"),
    ({"rope_parameters": {"rope_type": "yarn", **ROPE}}, r'rope_parameters\.rope_type is "yarn"; expected "default"'),
    ({"rope_scaling": {"type": "linear"}}, r'rope_scaling\.type is "linear"; expected "default"'),
    ({"rope_parameters": "default"}, r'text_config\.rope_parameters is "default"; expected an object'),
    ({"rope_parameters": {"rope_theta": 1e4}}, r"rope_parameters\.partial_rotary_factor is missing"),
    ({"rope_parameters": {"partial_rotary_factor": 1}}, r"rope_parameters\.rope_theta is missing"),
    ({"rope_parameters": {**ROPE, "rope_theta": -1}}, r"rope_parameters\.rope_theta is -1; expected a positive"),
    ({"rope_parameters": {**ROPE, "partial_rotary_factor": 2}}, r"partial_rotary_factor is 2; .* head_dim 16"),
    ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.2}}, r"factor is 0\.2; .* even number .* not 3"),
    ({"eos_token_id": "</s>"}, r'text_config\.eos_token_id is "</s>"; expected a token id'),
    ({"eos_token_id": [-1]}, r"text_config\.eos_token_id is \[-1\]; expected a token id"),
    ({"tie_word_embeddings": "no"}, r'text_config\.tie_word_embeddings is "no"; expected false or true'),
]
OUTER: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama"}, r'model_type is "llama"; expected "qwen3_5_moe" or "qwen3_5_moe_text"'),
    ({"model_type": 5}, r"model_type is 5; expected"),
    ({"text_config": [1]}, r"text_config is \[1\]; expected an object"),
    ({"tie_word_embeddings": True}, r"tie_word_embeddings is true; expected the same value as in text_config"),
]
QUANTIZATIONS: list[tuple[object, str]] = [
    ({"bits": 3, "group_size": 64}, r"quantization\.bits is 3; expected 4 or 8"),
    ({"bits": 4, "group_size": 16}, r"quantization\.group_size is 16; expected 32 or 64 or 128"),
    ({"bits": 4}, r"quantization\.group_size is missing"),
    ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, r'quantization\.mode is "mxfp4"; expected "affine"'),
    ({"quant_method": "fp8"}, r'quantization\.quant_method is "fp8"; expected "affine"'),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, r'quantization\.quant_method is "awq"'),
    ("4bit", r'quantization is "4bit"; expected an object'),
    ({**QUANTIZATION, "model.layers.0.mlp.gate": 8}, r"quantization\.model\.layers\.0\.mlp\.gate is 8; expected false"),
    ({**QUANTIZATION, "lm_head": {"bits": 6, "group_size": 64}}, r"quantization\.lm_head\.bits is 6; expected 4 or 8"),
    ({**QUANTIZATION, "lm_head": {"bits": 8}}, r"quantization\.lm_head\.group_size is missing"),
    (
        {**QUANTIZATION, "lm_head": False, "language_model.lm_head": True},
        r"quantization\.language_model\.lm_head is true; expected the same as the other override of lm_head",
    ),
]


@pytest.mark.parametrize(("change", "message"), INNER, ids=[message for _, message in INNER])
def test_refused_values_in_text_config(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json: .*" + message):
        parse(tiny_config(**change))


@pytest.mark.parametrize(("change", "message"), OUTER, ids=[message for _, message in OUTER])
def test_refused_values_beside_text_config(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json: " + message):
        parse({**tiny_config(), **change})


@pytest.mark.parametrize(("settings_", "message"), QUANTIZATIONS, ids=[message for _, message in QUANTIZATIONS])
def test_refused_quantization(settings_: object, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json: " + message):
        parse({**tiny_config(quantization=None), "quantization": settings_})


REQUIRED = [
    key
    for key in tiny_config()["text_config"]
    if key
    not in (
        "model_type",
        "layer_types",
        "rope_parameters",
        "hidden_act",
        "attention_bias",
        "attn_output_gate",
        "tie_word_embeddings",
        "eos_token_id",
    )
]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_keys_are_named(key: str) -> None:
    config = tiny_config()
    del config["text_config"][key]
    with pytest.raises(ConfigError, match=rf"text_config\.{key} is missing; expected"):
        parse(config)


def test_missing_model_type_is_named() -> None:
    config = tiny_config()
    del config["model_type"]
    with pytest.raises(ConfigError, match=r"^config\.json: model_type is missing"):
        parse(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON|model_type"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "nowhere.json")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def places(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key in a nested mapping, as a path."""
    found = []
    for key, inner in value.items():
        found.append((*path, key))
        if isinstance(inner, dict):
            found += places(inner, (*path, key))
    return found


FULL_QUANTIZATION = {**QUANTIZATION, "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}, "lm_head": False}


@given(
    st.lists(
        st.tuples(st.sampled_from(places(tiny_config(quantization=FULL_QUANTIZATION))), JSON_VALUES),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=300, deadline=None)
def test_any_edit_is_read_or_refused(edits: list[tuple[tuple[str, ...], Any]]) -> None:
    config = tiny_config(quantization=json.loads(json.dumps(FULL_QUANTIZATION)))
    for path, value in edits:
        inner: Any = config
        for key in path[:-1]:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner[path[-1]] = value
    try:
        parsed = parse(config)
        weights = abstract_weights(parsed)
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert weights.num_parameters > 0
        assert parsed.num_attention_heads == parsed.gqa_group * parsed.num_key_value_heads
    assert not refusal or "config.json" in refusal


@given(JSON_VALUES)
@settings(deadline=None)
def test_any_json_value_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json"):
        parse(value)
