"""Binding a checkpoint: every layout, dtype and name form of one model gives the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lily.catalog import find_model
from lily.checkpoint import Checkpoint
from lily.config import load_config, parse_config
from lily.errors import CheckpointError, ConfigError
from lily.weights import (
    FullAttentionWeights,
    LinearAttentionWeights,
    ModelWeights,
    abstract_weights,
    load_weights,
)
from tests.checkpoints import (
    DEMO,
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    QUANTIZATION,
    Linear,
    Model,
    Tensor,
    flat,
    huggingface_tensors,
    matrix_values,
    mlx_tensors,
    random_model,
    save,
    tiny_config,
    to_bf16,
    to_f16,
    to_f32,
    vector_values,
    write_demo_twin,
)

Change = Callable[[dict[str, Tensor]], None]

GATES = {f"language_model.model.layers.{i}.mlp.gate": {"group_size": 64, "bits": 8} for i in range(2)}


def load(directory: Path) -> ModelWeights:
    return load_weights(Checkpoint.open(directory), load_config(directory))


def assert_holds(weights: ModelWeights, model: Model) -> None:
    """Every weight, read through its region, has exactly the model's value: the values are chosen to be exact."""
    assert {matrix.name for matrix in weights.matrices()} == {p for p, v in model.items() if isinstance(v, Linear)}
    for matrix in weights.matrices():
        expected = model[matrix.name]
        assert isinstance(expected, Linear)
        np.testing.assert_array_equal(matrix_values(weights, matrix), expected.dense(), err_msg=matrix.name)
    vectors = {vector.name: vector_values(weights, vector) for vector in weights.vectors()}
    for path, expected in model.items():
        if not isinstance(expected, Linear):
            np.testing.assert_array_equal(vectors.pop(path), expected.reshape(-1), err_msg=path)
    assert not vectors


@pytest.fixture
def model() -> Model:
    return random_model(tiny_config())


UNQUANTIZED = tiny_config(quantization=None)

LAYOUTS: dict[str, tuple[Mapping[str, Any], Callable[[Model], dict[str, Tensor]]]] = {
    "mlx": (tiny_config(), mlx_tensors),
    "mlx, text-only names": (tiny_config(), lambda m: mlx_tensors(m, prefix="model.", lm_head="")),
    "mlx, no prefix": (tiny_config(), lambda m: mlx_tensors(m, prefix="", lm_head="")),
    "mlx, float16 scales": (tiny_config(), lambda m: mlx_tensors(m, scales=to_f16)),
    "mlx, float32 scales": (tiny_config(), lambda m: mlx_tensors(m, scales=to_f32)),
    "mlx, experts apart": (tiny_config(), lambda m: mlx_tensors(m, apart=True)),
    "mlx, experts apart, float16 scales": (
        tiny_config(),
        lambda m: mlx_tensors(m, apart=True, scales=to_f16),
    ),
    "mlx, unquantized": (UNQUANTIZED, lambda m: mlx_tensors(m, quantized=lambda path: False)),
    "mlx, float16": (
        UNQUANTIZED,
        lambda m: mlx_tensors(m, quantized=lambda path: False, dense=to_f16),
    ),
    "hugging face": (UNQUANTIZED, huggingface_tensors),
    "hugging face, text-only names": (
        UNQUANTIZED,
        lambda m: huggingface_tensors(m, prefix="model."),
    ),
    "hugging face, float16": (UNQUANTIZED, lambda m: huggingface_tensors(m, dense=to_f16)),
    "hugging face, float32": (UNQUANTIZED, lambda m: huggingface_tensors(m, dense=to_f32)),
    "hugging face, experts apart": (UNQUANTIZED, lambda m: huggingface_tensors(m, apart=True)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_case_24_every_layout_gives_the_same_weights(tmp_path: Path, model: Model, layout: str, shards: int) -> None:
    config, tensors = LAYOUTS[layout]
    weights = load(save(tmp_path, config, tensors(model), shards=shards))
    assert_holds(weights, model)
    assert weights.num_parameters == sum(v.codes.size if isinstance(v, Linear) else v.size for v in model.values())
    assert weights.stored_nbytes >= weights.num_parameters / 2


def test_case_24_flat_config_and_nested_config(tmp_path: Path, model: Model) -> None:
    nested = save(tmp_path / "nested", tiny_config(), mlx_tensors(model))
    beside = save(tmp_path / "flat", flat(tiny_config()), mlx_tensors(model))
    assert load(nested).config == load(beside).config
    assert_holds(load(beside), model)


@pytest.mark.parametrize("shards", [1, 3])
def test_case_24_no_index_file(tmp_path: Path, model: Model, shards: int) -> None:
    assert_holds(load(save(tmp_path, tiny_config(), mlx_tensors(model), shards=shards, index=False)), model)


def test_case_24_vision_and_mtp_are_left_out(tmp_path: Path, model: Model) -> None:
    tensors = mlx_tensors(model)
    for name in (
        "vision_tower.blocks.0.weight",
        "model.visual.patch_embed.weight",
        "visual.x",
        "mtp.fc.weight",
    ):
        tensors[name] = to_bf16(np.ones((2, 3)))
    checkpoint = Checkpoint.open(save(tmp_path, tiny_config(), tensors))
    assert checkpoint.skipped == {"vision": 3, "mtp": 1}
    assert_holds(load_weights(checkpoint, load_config(tmp_path)), model)


@pytest.mark.parametrize("stored_twice", [False, True])
def test_case_24_tied_embeddings(tmp_path: Path, stored_twice: bool) -> None:
    config = tiny_config(outer={"tie_word_embeddings": True}, tie_word_embeddings=True)
    model = random_model(config)
    tensors = mlx_tensors(model)
    if stored_twice:
        for part in ("weight", "scales", "biases"):
            tensors[f"language_model.lm_head.{part}"] = tensors[f"language_model.model.embed_tokens.{part}"]
    weights = load(save(tmp_path, config, tensors))
    assert weights.lm_head is weights.embed_tokens
    assert_holds(weights, model)


def test_tied_embeddings_with_another_output_matrix_are_refused(tmp_path: Path, model: Model) -> None:
    config = tiny_config(outer={"tie_word_embeddings": True}, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"'language_model\.lm_head\.weight' differs.*tie_word_embeddings"):
        load(save(tmp_path, config, mlx_tensors(model)))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.", ""])
def test_case_24_overrides_by_path(tmp_path: Path, prefix: str) -> None:
    overrides = {
        f"{prefix}layers.0.mlp.gate": {"group_size": 64, "bits": 8},
        f"{prefix}layers.1.mlp.switch_mlp.up_proj": {"group_size": 32, "bits": 8},
        f"{prefix}layers.0.linear_attn.in_proj_a": False,
    }
    config = tiny_config(quantization={**QUANTIZATION, **overrides})
    model = random_model(config)
    tensors = mlx_tensors(model, quantized=lambda path: path != "layers.0.linear_attn.in_proj_a")
    weights = load(save(tmp_path, config, tensors))
    formats = {matrix.name: (matrix.format, matrix.group_size) for matrix in weights.matrices()}
    assert formats.pop("layers.0.mlp.gate") == ("q8", 64)
    assert formats.pop("layers.1.mlp.switch_mlp.up_proj") == ("q8", 32)
    assert formats.pop("layers.0.linear_attn.in_proj_a") == ("bf16", 0)
    assert set(formats.values()) == {("q4", 32)}
    assert_holds(weights, model)


def test_overrides_of_experts_apart_must_agree(tmp_path: Path, model: Model) -> None:
    override = {"model.layers.0.mlp.experts.1.up_proj": {"group_size": 32, "bits": 8}}
    config = tiny_config(quantization={**QUANTIZATION, **override})
    with pytest.raises(CheckpointError, match=r"experts of layers\.0\.mlp\.switch_mlp\.up_proj.*differently"):
        load(save(tmp_path, config, mlx_tensors(model, apart=True)))


def test_case_24_a_float_matrix_without_scales_is_not_quantized(tmp_path: Path, model: Model) -> None:
    """Older conversions leave modules out without an override; the tensors say so themselves."""
    tensors = mlx_tensors(model, quantized=lambda path: not path.endswith("mlp.gate"))
    weights = load(save(tmp_path, tiny_config(), tensors))
    assert weights.layers[0].moe.gate.format == "bf16"
    assert_holds(weights, model)


def test_case_24_the_demo_model_and_its_hugging_face_twin(tmp_path: Path) -> None:
    """Equal but for what has 8 bits, which the twin rounds to bfloat16: by half a unit of its 8 bits, 2^-8 relative."""
    ours, twin = load(DEMO), load(write_demo_twin(tmp_path))
    assert len(twin.sources) == 4
    eight_bits = 0
    for mine, theirs in zip(ours.matrices(), twin.matrices(), strict=True):
        assert mine.name == theirs.name
        assert theirs.format == "bf16"
        tolerance = 0.0 if mine.format == "q4" else 2.0**-8
        eight_bits += mine.format == "q8"
        np.testing.assert_allclose(matrix_values(twin, theirs), matrix_values(ours, mine), rtol=tolerance, atol=0)
    assert eight_bits == 8 * 2 + 6 * 2
    for mine_, theirs_ in zip(ours.vectors(), twin.vectors(), strict=True):
        np.testing.assert_array_equal(vector_values(twin, theirs_), vector_values(ours, mine_), err_msg=mine_.name)


def test_matrices_stay_mapped(tmp_path: Path, model: Model) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, tiny_config(), mlx_tensors(model), shards=2))
    weights = load_weights(checkpoint, load_config(tmp_path))
    assert len(weights.sources) == 3
    for source, shard in zip(weights.sources, checkpoint.shards, strict=False):
        assert np.shares_memory(source, shard.buffer)
    for matrix in weights.matrices():
        for region in (matrix.weight, matrix.scales, matrix.biases):
            assert region is not None
            assert region.source < 2
    name = "language_model.model.embed_tokens.weight"
    assert np.shares_memory(weights.bytes_of(weights.embed_tokens.weight), checkpoint.array(name))
    # Lily's own source: the vectors, in float32, each padded to 64 bytes at most.
    sizes = [vector.size for vector in weights.vectors()]
    assert weights.sources[2].size <= 4 * sum(sizes) + 64 * len(sizes)


def test_only_experts_apart_are_copied(tmp_path: Path, model: Model) -> None:
    weights = load(save(tmp_path, tiny_config(), mlx_tensors(model, apart=True)))
    copied = {matrix.name.split(".", 2)[-1] for matrix in weights.matrices() if matrix.weight.source == 1}
    assert copied == {f"mlp.switch_mlp.{part}_proj" for part in ("gate", "up", "down")}


def test_own_source_is_page_aligned_and_its_regions_are_by_64(tmp_path: Path, model: Model) -> None:
    weights = load(save(tmp_path, tiny_config(), mlx_tensors(model, apart=True, scales=to_f16)))
    assert all(source.ctypes.data % 4096 == 0 for source in weights.sources)
    assert not any(source.flags.writeable for source in weights.sources)
    last = len(weights.sources) - 1
    regions = [region for m in weights.matrices() for region in (m.weight, m.scales, m.biases) if region]
    assert {vector.region.source for vector in weights.vectors()} == {last}
    own = [region for region in regions if region.source == last] + [v.region for v in weights.vectors()]
    assert len(own) > len(list(weights.vectors()))
    assert all(region.offset % 64 == 0 for region in own)
    ends = sorted((region.offset, region.offset + region.nbytes) for region in own)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))


def test_fused_gate_and_up_share_the_tensor(tmp_path: Path, model: Model) -> None:
    weights = load(save(tmp_path, UNQUANTIZED, huggingface_tensors(model)))
    moe = weights.layers[0].moe
    rows, cols = 32, 64
    assert (moe.gate_proj.weight_stride, moe.up_proj.weight_stride) == (2 * rows * cols * 2,) * 2
    assert moe.up_proj.weight.offset == moe.gate_proj.weight.offset + rows * cols * 2
    assert moe.gate_proj.weight.nbytes == 3 * moe.gate_proj.weight_stride + rows * cols * 2
    assert moe.gate_proj.nbytes == 4 * rows * cols * 2
    assert moe.gate_proj.expert_nbytes == rows * cols * 2


def test_mixers_follow_the_layer_types(tmp_path: Path, model: Model) -> None:
    linear, full = load(save(tmp_path, tiny_config(), mlx_tensors(model))).layers
    assert isinstance(linear.mixer, LinearAttentionWeights)
    assert isinstance(full.mixer, FullAttentionWeights)
    assert (full.mixer.q_proj.rows, full.mixer.o_proj.cols) == (2 * 4 * 16, 4 * 16)


def _rename(old: str, new: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[new] = tensors.pop(old)

    return change


def _replace(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = make(tensors[name])

    return change


def _drop(name: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


P = "language_model.model."
QKV, CONV, SWITCH = (
    P + "layers.0.linear_attn.in_proj_qkv",
    P + "layers.0.linear_attn.conv1d.weight",
    P + "layers.0.mlp.switch_mlp",
)
BROKEN: dict[str, tuple[Change, str]] = {
    "missing matrix": (_drop(f"{QKV}.weight"), rf"tensor '{QKV}\.weight' is missing"),
    "missing scales": (_drop(f"{QKV}.scales"), rf"tensor '{QKV}\.scales' is missing"),
    "missing biases": (_drop(f"{QKV}.biases"), rf"tensor '{QKV}\.biases' is missing"),
    "missing vector": (_drop(P + "layers.0.linear_attn.A_log"), r"linear_attn\.A_log' is missing"),
    "missing convolution": (_drop(CONV), rf"tensor '{CONV}' is missing"),
    "missing experts": (
        _drop(f"{SWITCH}.up_proj.weight"),
        rf"tensor '{SWITCH}\.up_proj\.weight' is missing",
    ),
    "missing head": (
        _drop("language_model.lm_head.weight"),
        r"tensor 'lm_head\.weight' is missing",
    ),
    "missing embedding": (
        _drop(P + "embed_tokens.weight"),
        r"tensor 'embed_tokens\.weight' is missing",
    ),
    "wrong words": (
        _replace(f"{QKV}.weight", lambda t: Tensor("U32", t.array[:, :-1])),
        r"safetensors: tensor '.*in_proj_qkv\.weight' is U32 \[96, 7\]; expected U32 \[96, 8\]",
    ),
    "wrong scales": (
        _replace(f"{QKV}.scales", lambda t: Tensor("BF16", t.array[:-1])),
        r"in_proj_qkv\.scales' is BF16 \[95, 2\]; expected BF16 or F16 or F32 \[96, 2\]",
    ),
    "wrong scale dtype": (
        _replace(f"{QKV}.biases", lambda t: Tensor("I16", t.array)),
        r"in_proj_qkv\.biases' is I16 \[96, 2\]; expected BF16",
    ),
    "wrong matrix dtype": (
        _replace(f"{P}layers.0.mlp.gate.weight", lambda t: Tensor("I32", t.array)),
        r"mlp\.gate\.weight' is I32 \[4, 8\]; expected U32, because it has scales",
    ),
    "wrong norm shape": (
        _replace(P + "norm.weight", lambda t: Tensor("BF16", t.array[1:])),
        r"model\.norm\.weight' is BF16 \[63\]; expected .* \[64\]",
    ),
    "wrong norm dtype": (
        _replace(P + "norm.weight", lambda t: Tensor("U16", t.array)),
        r"model\.norm\.weight' is U16 \[64\]; expected BF16 or F16 or F32 or F64 \[64\]",
    ),
    "wrong convolution": (
        _replace(CONV, lambda t: Tensor("BF16", t.array.reshape(-1))),
        r"conv1d\.weight' is BF16 \[384\]; expected shape \[96, 1, 4\] or \[96, 4, 1\]",
    ),
    "renamed tensor": (
        _rename(P + "norm.weight", P + "norm.bias"),
        r"norm\.weight' is missing",
    ),
    "two prefixes": (
        lambda tensors: tensors.update({"model.norm.weight": tensors[P + "norm.weight"]}),
        r"'language_model\.model\.norm\.weight' and 'model\.norm\.weight' are the same|"
        r"'model\.norm\.weight' and 'language_model\.model\.norm\.weight' are the same",
    ),
    "tensor of no model": (
        lambda tensors: tensors.update({P + "layers.0.linear_attn.conv1d.bias": to_bf16(np.ones(96))}),
        r"conv1d\.bias' is not part of the model",
    ),
    "more layers than the configuration": (
        lambda tensors: tensors.update({P + "layers.2.input_layernorm.weight": to_bf16(np.ones(64))}),
        r"layers\.2\.input_layernorm\.weight' is not part of the model",
    ),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_mistakes_name_file_and_tensor(tmp_path: Path, model: Model, mistake: str) -> None:
    change, message = BROKEN[mistake]
    tensors = mlx_tensors(model)
    change(tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(save(tmp_path, tiny_config(), tensors))
    assert str(tmp_path) in str(caught.value)


def test_packed_weights_without_a_quantization_setting_are_refused(tmp_path: Path, model: Model) -> None:
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight' is U32 .*doesn't quantize it"):
        load(save(tmp_path, UNQUANTIZED, mlx_tensors(model)))


def test_a_setting_of_other_bits_is_refused(tmp_path: Path, model: Model) -> None:
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight' is U32 \[96, 8\]; expected U32 \[96, 16\]"):
        load(
            save(
                tmp_path,
                tiny_config(quantization={"group_size": 32, "bits": 8}),
                mlx_tensors(model),
            )
        )


def test_rows_that_groups_do_not_divide_are_refused(tmp_path: Path, model: Model) -> None:
    config = tiny_config(quantization={"group_size": 64, "bits": 4})
    tensors = mlx_tensors(random_model(tiny_config(quantization={"group_size": 32, "bits": 4})))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.scales' is BF16 \[96, 2\]; expected .* \[96, 1\]"):
        load(save(tmp_path, config, tensors))
    with pytest.raises(ConfigError, match=r"out_proj has rows of 32 weights; .* groups of 64"):
        abstract_weights(parse_config(config, "config.json"))


def test_hugging_face_names_are_used_when_experts_are_missing(tmp_path: Path, model: Model) -> None:
    tensors = huggingface_tensors(model)
    del tensors["model.language_model.layers.1.mlp.experts.gate_up_proj"]
    with pytest.raises(
        CheckpointError,
        match=r"'model\.language_model\.layers\.1\.mlp\.experts\.gate_up_proj' is mis",
    ):
        load(save(tmp_path, UNQUANTIZED, tensors))


def test_an_expert_missing_among_those_apart(tmp_path: Path, model: Model) -> None:
    tensors = mlx_tensors(model, apart=True)
    del tensors[f"{P}layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.2\.up_proj\.weight' is missing"):
        load(save(tmp_path, tiny_config(), tensors))


def test_mixed_layouts_are_refused(tmp_path: Path) -> None:
    config = tiny_config(quantization=None, num_hidden_layers=2, layer_types=[LINEAR_ATTENTION] * 2)
    model = random_model(config)
    mlx = mlx_tensors(model, prefix="model.", lm_head="", quantized=lambda path: False)
    theirs = huggingface_tensors(model, prefix="model.")
    tensors = {name: tensor for name, tensor in mlx.items() if "layers.1." not in name}
    tensors.update({name: tensor for name, tensor in theirs.items() if "layers.1." in name})
    with pytest.raises(CheckpointError, match=r"mixed layouts: tensor 'model\.layers\.1.*'model\.layers\.0.*MLX"):
        load(save(tmp_path / "layers", config, tensors))
    conv = "model.layers.0.linear_attn.conv1d.weight"
    with pytest.raises(CheckpointError, match="mixed layouts"):
        load(save(tmp_path / "convolution", config, {**theirs, conv: mlx[conv]}))


@pytest.mark.parametrize("layout", ["mlx", "hugging face"])
def test_layout_without_a_convolution_is_told_by_the_experts(tmp_path: Path, layout: str) -> None:
    config = tiny_config(
        quantization=None if layout == "hugging face" else QUANTIZATION,
        layer_types=[FULL_ATTENTION] * 2,
    )
    model = random_model(config)
    assert_holds(load(save(tmp_path / "told", config, LAYOUTS[layout][1](model))), model)
    if layout == "hugging face":
        with pytest.raises(CheckpointError, match="can't tell"):
            load(save(tmp_path / "untold", config, huggingface_tensors(model, apart=True)))


def test_abstract_weights_are_what_a_conversion_would_hold(tmp_path: Path) -> None:
    config = tiny_config(quantization={**QUANTIZATION, **GATES})
    loaded = load(save(tmp_path, config, mlx_tensors(random_model(config))))
    abstract = abstract_weights(loaded.config)
    assert abstract.sources == []
    for real, planned in zip(loaded.matrices(), abstract.matrices(), strict=True):
        for name in (
            "name",
            "rows",
            "cols",
            "experts",
            "format",
            "group_size",
            "weight_stride",
            "scale_stride",
        ):
            assert getattr(real, name) == getattr(planned, name), real.name
        for mine, theirs in ((real.weight, planned.weight), (real.scales, planned.scales)):
            assert mine is not None
            assert theirs is not None
            assert mine.nbytes == theirs.nbytes
    assert [v.name for v in loaded.vectors()] == [v.name for v in abstract.vectors()]
    assert abstract.nbytes == loaded.nbytes
    regions = [r for m in abstract.matrices() for r in (m.weight, m.scales, m.biases) if r is not None]
    ends = sorted((r.offset, r.offset + r.nbytes) for r in regions + [v.region for v in abstract.vectors()])
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))


def test_sizes_of_the_35b_model() -> None:
    """model_spec §10: the checkpoint as MLX stores it, vectors in bfloat16 but A_log in float32."""
    config = load_config(find_model("qwen3.6-35b-a3b").path)
    weights = abstract_weights(config)
    assert weights.num_parameters == 34_660_610_688
    assert weights.stored_nbytes == 19_508_789_376
    vectors = sum(vector.size for vector in weights.vectors())
    assert weights.nbytes - weights.stored_nbytes == 2 * (vectors - 30 * 32)
    moe = weights.layers[0].moe
    assert [m.expert_nbytes for m in (moe.gate_proj, moe.up_proj, moe.down_proj)] == [589_824] * 3
    experts = sum(m.size for m in weights.matrices() if m.experts)
    assert experts == 32_212_254_720


def test_stored_bytes_are_those_of_the_file() -> None:
    checkpoint = Checkpoint.open(DEMO)
    assert load_weights(checkpoint, load_config(DEMO)).stored_nbytes == checkpoint.nbytes
