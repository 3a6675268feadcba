"""Names, shapes and dtypes, against the builders of the loader's tests and the figures of model_spec §10."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    Tensor,
    huggingface_tensors,
    mlx_tensors,
    random_model,
    save,
    tiny_config,
    to_bf16,
)

from lily import layout
from lily.catalog import find_model
from lily.checkpoint import Checkpoint
from lily.config import ModelConfig, load_config, parse_config
from lily.errors import CheckpointError
from lily.matrix import Matrix
from lily.shard_writer import TensorSpec

TINY = tiny_config(quantization=None)


def described(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, tensor.dtype, tensor.array.shape) for name, tensor in tensors.items()}


def by_name(specs: list[tuple[TensorSpec, ...]]) -> dict[str, TensorSpec]:
    return {spec.name: spec for group in specs for spec in group}


@pytest.mark.parametrize("tied", [False, True])
def test_mlx_names_shapes_and_dtypes(tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied, outer={"tie_word_embeddings": tied})
    expected = described(mlx_tensors(random_model(config)))
    # The builder keeps it as the release has it; a conversion casts it.
    name = "language_model.model.layers.0.linear_attn.norm.weight"
    expected[name] = TensorSpec(name, "BF16", (8,))
    parsed = parse_config(config, "config.json")
    assert by_name([layout.mlx_tensors(part, parsed, "BF16") for part in layout.mlx_parts(parsed)]) == expected


def test_huggingface_names_shapes_and_dtypes() -> None:
    parsed = parse_config(TINY, "config.json")
    specs = by_name([layout.huggingface_tensors(part, parsed) for part in layout.huggingface_parts(parsed)])
    assert specs == described(huggingface_tensors(random_model(TINY)))


def test_parts_are_in_the_order_of_the_layers() -> None:
    layers = [LINEAR_ATTENTION] * 3 + [FULL_ATTENTION]
    config = tiny_config(layer_types=layers * 3, num_hidden_layers=12)
    names = [part.name for part in layout.mlx_parts(parse_config(config, "config.json"))]
    order = [name.split(".")[1] if name.startswith("layers.") else name for name in names]
    assert list(dict.fromkeys(order)) == ["embed_tokens", *map(str, range(12)), "lm_head", "norm.weight"]


def test_the_real_model_has_the_size_of_the_specification() -> None:
    config = load_config(find_model("qwen3.6-35b-a3b").path)
    parts = layout.mlx_parts(config)
    specs = by_name([layout.mlx_tensors(part, config, "BF16") for part in parts])
    assert sum(part.size for part in parts) == 34_660_610_688
    assert sum(spec.nbytes for spec in specs.values()) == 19_508_789_376
    layer = "language_model.model.layers.39"
    assert specs[f"{layer}.mlp.switch_mlp.gate_proj.weight"].shape == (256, 512, 256)
    assert specs[f"{layer}.mlp.switch_mlp.down_proj.scales"].shape == (256, 2048, 8)
    assert specs[f"{layer}.mlp.gate.weight"].shape == (256, 512)
    assert specs[f"{layer}.self_attn.q_proj.biases"].shape == (8192, 32)


def section(**changes: Any) -> dict[str, Any]:
    options = {"bits": 4, "group_size": 32, "gate_bits": 8}
    sizes = {key: value for key, value in changes.items() if key not in options}
    config = parse_config(tiny_config(quantization=None, **sizes), "config.json")
    return layout.quantization_section(config, **(options | {k: v for k, v in changes.items() if k in options}))


def test_gates_are_overridden_and_nothing_else() -> None:
    gates = [f"language_model.model.layers.{i}.mlp.{gate}" for i in (0, 1) for gate in ("gate", "shared_expert_gate")]
    expected = {"group_size": 32, "bits": 4, "mode": "affine"} | {gate: {"group_size": 64, "bits": 8} for gate in gates}
    assert section() == expected
    assert section(gate_bits=4)[gates[0]] == {"group_size": 64, "bits": 4}
    assert section(bits=8)["bits"] == 8


def test_rows_that_make_no_whole_groups_stay_unquantized() -> None:
    # Rows of hidden_size 64 and of moe_intermediate_size 32; the shared expert's down projection has 96.
    unquantized = {path for path, setting in section(group_size=64).items() if setting is False}
    assert {path.split(".", 4)[4] for path in unquantized} == {
        "mlp.switch_mlp.down_proj",
        "mlp.shared_expert.down_proj",
        "linear_attn.out_proj",
    }
    # The gates' own groups are of 64.
    assert section(hidden_size=96)["language_model.model.layers.0.mlp.gate"] is False


def test_unquantized_parts_are_planned_as_such() -> None:
    config = parse_config(layout.with_quantization(TINY, section(group_size=64)), "config.json")
    parts = {part.name: part for part in layout.mlx_parts(config)}
    down = parts["layers.0.mlp.switch_mlp.down_proj"]
    assert isinstance(down, Matrix)
    assert layout.mlx_tensors(down, config, "F16") == (
        TensorSpec("language_model.model.layers.0.mlp.switch_mlp.down_proj.weight", "F16", (4, 64, 32)),
    )


def opened(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[Checkpoint, ModelConfig]:
    save(directory, config, tensors)
    return Checkpoint.open(directory), load_config(directory)


@pytest.mark.parametrize("apart", [False, True])
def test_bind_finds_every_part(tmp_path: Path, apart: bool) -> None:
    tensors = huggingface_tensors(random_model(TINY), apart=apart)
    checkpoint, config = opened(tmp_path, tensors, TINY)
    bound = layout.bind(checkpoint, config)[1]
    assert {part.name: part.size for part in layout.mlx_parts(config)} == {n: part.size for n, part in bound.items()}


def test_bind_names_what_does_not_belong(tmp_path: Path) -> None:
    tensors = huggingface_tensors(random_model(TINY))
    spare = to_bf16(tensors["lm_head.weight"].array.astype("f4"))
    with pytest.raises(CheckpointError, match=r"tensor 'model\.spare' is not part of the model .*\(1 such tensors\)"):
        layout.bind(*opened(tmp_path, tensors | {"model.spare": spare}, TINY))


def test_bind_names_what_is_missing(tmp_path: Path) -> None:
    tensors = huggingface_tensors(random_model(TINY))
    del tensors["model.language_model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"tensor 'model\.language_model\.norm\.weight' is missing"):
        layout.bind(*opened(tmp_path, tensors, TINY))


def test_a_configuration_gets_the_section_twice() -> None:
    config = json.loads(json.dumps(layout.with_quantization(TINY, section())))
    assert config["quantization"] == config["quantization_config"] == section()
    assert {key: value for key, value in config.items() if "quantization" not in key} == TINY
