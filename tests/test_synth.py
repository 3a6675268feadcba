"""Random weights at a named shape: whole, of the right size, and with activations of order one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FULL_ATTENTION, LINEAR_ATTENTION, Linear, read_mlx, tiny_config
from commands import lily as run

from lily.byte_tokenizer import END_OF_TEXT
from lily.catalog import find_model
from lily.checkpoint import Checkpoint
from lily.config import load_config
from lily.convert import convert
from lily.errors import ConfigError, UsageError
from lily.layout import huggingface_parts, huggingface_tensors, mlx_parts, mlx_tensors
from lily.reference import ReferenceModel
from lily.reference.tensors import read_tensors
from lily.synth import synth
from lily.tokenizer import Tokenizer
from lily.weights import load_weights

LAYERS = [LINEAR_ATTENTION] * 3 + [FULL_ATTENTION]
SHAPE = {"layer_types": LAYERS * 2, "num_hidden_layers": 8, "vocab_size": 512, "eos_token_id": 500}


def shape(directory: Path, *, quantization: Any = None, **changes: Any) -> Path:
    """A directory with nothing but a configuration."""
    directory.mkdir()
    config = tiny_config(quantization=quantization, **(SHAPE | changes))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def text_config(directory: Path) -> dict[str, Any]:
    section: dict[str, Any] = json.loads((directory / "config.json").read_text())["text_config"]
    return section


def contents(directory: Path) -> dict[str, bytes]:
    checkpoint = Checkpoint.open(directory)
    return {name: checkpoint.array(name).tobytes() for name in checkpoint.tensors}


@pytest.mark.parametrize("huggingface", [False, True])
def test_names_shapes_and_dtypes(tmp_path: Path, huggingface: bool) -> None:
    written = synth(shape(tmp_path / "shape"), tmp_path / "out", huggingface=huggingface)
    config = load_config(written.path)
    assert (config.quantization is None) is huggingface
    if huggingface:
        specs = [huggingface_tensors(part, config) for part in huggingface_parts(config)]
    else:
        specs = [mlx_tensors(part, config, "BF16") for part in mlx_parts(config)]
    expected = {spec.name: (spec.dtype, spec.shape) for group in specs for spec in group}
    found = Checkpoint.open(written.path).tensors
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == expected
    weights = load_weights(Checkpoint.open(written.path), config)
    assert weights.num_parameters == written.parameters
    assert weights.stored_nbytes == written.nbytes


@pytest.mark.parametrize("huggingface", [False, True])
def test_logits_are_finite_and_of_order_one(tmp_path: Path, huggingface: bool) -> None:
    """At the demo model's widths, over eight layers; the figures are those of a normal distribution, roughly."""
    synth("demo", tmp_path / "out", huggingface=huggingface, seed=3)
    model = ReferenceModel.load(tmp_path / "out")
    logits = model.forward([3, 1, 4, 1, 5, 9, 2, 6])
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2
    assert np.abs(logits.mean()) < 0.5
    stream = list(model.residual_stream([3, 1, 4, 1, 5, 9, 2, 6]))[-1]
    # Sixteen mixers and mixtures, each of order one at most, added to an embedding of variance one.
    assert 0.5 < stream.std() < 8


@pytest.mark.parametrize("huggingface", [False, True])
def test_weights_have_the_deviation_that_keeps_variance(tmp_path: Path, huggingface: bool) -> None:
    synth("demo", tmp_path / "out", layers=4, huggingface=huggingface)
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = read_tensors(tmp_path / "out", document)
    for name, values in tensors.items():
        if values.ndim < 2 or "conv1d" in name:
            continue
        deviation = 1.0 if name == "embed_tokens" else values.shape[-1] ** -0.5
        # Six standard errors of the mean and of the deviation of so many values, the latter also 3 % for the
        # quarter by which scales differ and their rounding.
        assert abs(values.mean()) < 6 * deviation / values.size**0.5 + 0.01 * deviation, name
        assert values.std() == pytest.approx(deviation, rel=0.03 + 6 / values.size**0.5), name


def test_codes_scales_and_biases_vary(tmp_path: Path) -> None:
    synth("demo", tmp_path / "out", layers=4)
    for path, value in read_mlx(tmp_path / "out").items():
        if isinstance(value, Linear) and value.codes.size > 100_000:
            counts = np.bincount(value.codes.reshape(-1), minlength=2**value.bits)
            assert len(counts) == 2**value.bits
            assert counts.min() > 0.8 * counts.mean(), path
            assert 0.4 < (value.scales < 0).mean() < 0.6
            rows = value.codes.reshape(-1, value.codes.shape[-1])
            assert len(np.unique(rows, axis=0)) == len(rows), f"{path} has equal rows"


def test_a_layer_is_the_same_at_any_depth_and_shard_size(tmp_path: Path) -> None:
    directory = shape(tmp_path / "shape")
    whole = contents(synth(directory, tmp_path / "whole").path)
    sharded = synth(directory, tmp_path / "sharded", shard_nbytes=20_000)
    assert sharded.shards > 3
    assert contents(sharded.path) == whole
    part = contents(synth(directory, tmp_path / "part", layers=4).path)
    assert part == {name: whole[name] for name in part}
    assert len(part) < len(whole)
    other = contents(synth(directory, tmp_path / "other", seed=1).path)
    assert other.keys() == whole.keys()
    assert all(other[name] != whole[name] for name in whole)


def test_fewer_layers_keep_the_pattern_and_the_overrides_that_apply(tmp_path: Path) -> None:
    overrides = {f"language_model.model.layers.{i}.mlp.gate": {"bits": 8, "group_size": 64} for i in range(8)}
    quantization = {"bits": 4, "group_size": 32, "lm_head": False} | overrides
    directory = shape(tmp_path / "shape", quantization=quantization)
    synth(directory, tmp_path / "out", layers=5)
    assert text_config(tmp_path / "out")["layer_types"] == [*LAYERS, LINEAR_ATTENTION]
    assert text_config(tmp_path / "out")["num_hidden_layers"] == 5
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert section == {key: value for key, value in quantization.items() if not key.startswith(tuple(overrides)[5:])}
    tensors = Checkpoint.open(tmp_path / "out").tensors
    assert tensors["language_model.lm_head.weight"].dtype == "BF16"
    assert tensors["language_model.model.layers.4.mlp.gate.weight"].shape == (4, 16)


def test_a_pattern_that_is_only_an_interval(tmp_path: Path) -> None:
    directory = shape(tmp_path / "shape", layer_types=None, full_attention_interval=2)
    synth(directory, tmp_path / "out", layers=3)
    assert load_config(tmp_path / "out").layer_types == (LINEAR_ATTENTION, FULL_ATTENTION, LINEAR_ATTENTION)


def test_a_model_without_a_tokenizer_gets_one_that_works(tmp_path: Path) -> None:
    synth(shape(tmp_path / "shape"), tmp_path / "out", vocab=1000)
    tokenizer = Tokenizer.load(tmp_path / "out")
    text = "Grüße, 世界 🌍!\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    config = load_config(tmp_path / "out")
    assert config.vocab_size == 1000 == len(tokenizer.valid_ids(1000))
    end = tokenizer.token_id(END_OF_TEXT)
    assert config.eos_token_ids == (end,)
    assert text_config(tmp_path / "out")["eos_token_id"] == end == 999
    assert tokenizer.eos_ids(tmp_path / "out", config.eos_token_ids) == (end,)
    with pytest.raises(UsageError, match="a vocabulary of 200 is too small"):
        synth(tmp_path / "shape", tmp_path / "small", vocab=200)


def test_a_models_own_tokenizer_is_kept(tmp_path: Path) -> None:
    synth("demo", tmp_path / "out", layers=1, vocab=5000)
    demo = find_model("demo").path
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (demo / name).read_bytes()
    assert load_config(tmp_path / "out").eos_token_ids == load_config(demo).eos_token_ids
    with pytest.raises(UsageError, match=r"demo can't have a vocabulary of 300: .*beyond the model's vocabulary"):
        synth("demo", tmp_path / "small", vocab=300)


def test_a_random_model_converts(tmp_path: Path) -> None:
    synth(shape(tmp_path / "shape"), tmp_path / "hf", huggingface=True)
    written = convert(tmp_path / "hf", tmp_path / "out", group_size=32)
    assert (written.path / "tokenizer.json").is_file()
    logits = [ReferenceModel.load(tmp_path / name).forward([1, 2, 3]) for name in ("hf", "out")]
    # Four bits of a normal distribution leave about 10 % of it as noise in each matrix.
    assert np.corrcoef(logits[0].ravel(), logits[1].ravel())[0, 1] > 0.5


def test_refusals(tmp_path: Path) -> None:
    directory = shape(tmp_path / "shape")
    with pytest.raises(UsageError, match=r"shape has 8 layers; it can be cut to 1 \.\. 8, not to 9"):
        synth(directory, tmp_path / "out", layers=9)
    with pytest.raises(UsageError, match=r"did you mean qwen3\.6-35b-a3b"):
        synth("qwen3.6-35b", tmp_path / "out")
    with pytest.raises(UsageError, match="shape exists already"):
        synth(directory, directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        synth(directory, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["shape"]


def test_the_command(tmp_path: Path) -> None:
    directory, out = shape(tmp_path / "shape"), tmp_path / "out"
    arguments = ("synth", str(directory), str(out), "--layers", "4", "--vocab", "600", "--seed", "5")
    done = run(*arguments)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{out}: ")
    first = contents(out)
    assert run(*arguments).err == f"lily: {out} exists already; give another name, or --force to replace it\n"
    done = run(*arguments, "--force", "--json", "--shard-size", "10kB")
    assert done.code == 0, done.err
    assert contents(out) == first
    assert done.json["shards"] > 1
    assert done.json["bytes"] == Checkpoint.open(out).nbytes
    done = run("synth", str(directory), str(tmp_path / "hf"), "--hf", "--json")
    # linear_attn.norm and A_log have 32 bits, the rest 16.
    assert 16 <= done.json["bits_per_weight"] < 16.1
    assert "lily synth qwen3.6-35b-a3b" in run("synth", "--help").out
