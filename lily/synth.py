"""Random weights at a model's shape, for speed and memory where the weights' values don't matter.

The values keep every activation of order one at any depth, so that nothing overflows, underflows or saturates
and kernels see numbers like a trained model's. A norm makes each projection's input unit variance; weights of
standard deviation ``1 / sqrt(cols)`` pass that on, whatever the width. Embeddings have unit variance themselves,
norms multiply by about one, and the decay of the recurrent state is drawn as Mamba-like models initialise it:
``A`` uniform in 1 .. 16, the time step log-uniform in 0.001 .. 0.1.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np

from lily.byte_tokenizer import END_OF_TEXT, byte_tokenizer, tokenizer_config
from lily.catalog import Model, find_model
from lily.checkpoint_writer import SHARD_NBYTES, Written, companion_files, json_bytes, write_checkpoint
from lily.config import canonical, load_config, parse_config
from lily.errors import CheckpointError, ConfigError, UsageError
from lily.json_file import read_json_object
from lily.layout import (
    DROPPED_KEYS,
    QUANTIZATION_KEYS,
    huggingface_parts,
    huggingface_tensors,
    is_norm,
    mlx_parts,
    mlx_tensors,
    quantization_section,
    with_quantization,
)
from lily.matrix import Matrix, Vector
from lily.output_directory import check_destination
from lily.progress import SILENT, Progress
from lily.quantize import float32_to_bf16
from lily.shard_writer import Part, Shards, TensorSpec
from lily.tokenizer import Tokenizer

__all__ = ["synth"]

Array: TypeAlias = np.ndarray[Any, Any]

PIECE_NBYTES = 1 << 20  # stays in a second-level cache until it is written


def synth(
    model: str | Path,
    destination: str | Path,
    *,
    layers: int | None = None,
    vocab: int | None = None,
    shard_nbytes: int = SHARD_NBYTES,
    seed: int = 0,
    huggingface: bool = False,
    force: bool = False,
    progress: Progress = SILENT,
) -> Written:
    """Write a checkpoint of random weights, all or nothing.

    A tensor's values depend on its name, its shape and the seed only: a layer is the same in a model of four layers
    and of forty. A model without a tokenizer gets one of bytes.

    Args:
        model: a built-in name, or the path of a model or its ``config.json``; only the configuration is read.
        destination: a directory that doesn't exist.
        layers: the first so many of the model's; None for all.
        vocab: rows of the embedding and the output matrix; None for the model's own.
        shard_nbytes: at most so large is a file, if its tensors allow it.
        seed: at least 0.
        huggingface: bfloat16 in Hugging Face's layout, normally distributed, instead of MLX's affine layout.
        force: replace ``destination``.

    Raises:
        UsageError: no such model, a size out of range, or ``destination`` is in the way.
        ConfigError: the configuration is malformed or not of this family.
        OutputError: there is no room, or writing failed.
    """
    found = find_model(model)
    destination = check_destination(Path(destination), force=force)
    document = _shaped(found, layers, vocab)
    files = _tokenizer_files(found, document)
    source = str(found.path / "config.json")
    config = parse_config(document, source)
    if huggingface:
        document = {key: value for key, value in document.items() if key not in QUANTIZATION_KEYS}
        config = parse_config(document, source)
        parts = [
            _part(part, huggingface_tensors(part, config), seed, zero_centred=True)
            for part in huggingface_parts(config)
        ]
    else:
        if config.quantization is None:
            document = with_quantization(document, quantization_section(config, 4, 64, 8))
            config = parse_config(document, source)
        parts = [_part(part, mlx_tensors(part, config, "BF16"), seed, zero_centred=False) for part in mlx_parts(config)]
    return write_checkpoint(
        destination,
        Shards(parts, shard_nbytes, sum(part.size for part in mlx_parts(config)), "pt" if huggingface else "mlx"),
        {"config.json": json_bytes(document), **files},
        force=force,
        progress=progress,
    )


def _shaped(found: Model, layers: int | None, vocab: int | None) -> dict[str, Any]:
    """``config.json`` with other numbers of layers and vocabulary rows."""
    config = load_config(found.path)
    document = copy.deepcopy(read_json_object(found.path / "config.json"))
    if document is None:
        raise ConfigError(f"{config.source}: no such file; a model's directory holds its config.json")
    for key in DROPPED_KEYS:
        document.pop(key, None)
    text = _text(document)
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise UsageError(
                f"{found.name} has {config.num_hidden_layers} layers; it can be cut to 1 .. "
                f"{config.num_hidden_layers}, not to {layers}"
            )
        text["num_hidden_layers"] = layers
        text["layer_types"] = list(config.layer_types[:layers])
        for section in (document.get(key) or {} for key in QUANTIZATION_KEYS):
            for path in [path for path in section if _layer(path) >= layers]:
                del section[path]
    if vocab is not None:
        text["vocab_size"] = vocab
    return document


def _text(document: dict[str, Any]) -> dict[str, Any]:
    """Where the text model's keys are."""
    section: dict[str, Any] = document.get("text_config") or document
    return section


def _layer(path: str) -> int:
    """The layer that a module's path names, or -1."""
    words = canonical(path).split(".")
    return int(words[1]) if words[0] == "layers" and words[1].isdecimal() else -1


def _tokenizer_files(found: Model, document: dict[str, Any]) -> Mapping[str, bytes | Path]:
    """The model's own tokenizer, or one of bytes, whose ids then go into ``document``."""
    files = companion_files(found.path)
    vocab = _text(document)["vocab_size"]
    if "tokenizer.json" in files:
        try:
            Tokenizer.load(found.path).valid_ids(vocab)
        except CheckpointError as error:
            raise UsageError(f"{found.name} can't have a vocabulary of {vocab}: {error}") from error
        return files
    tokenizer = byte_tokenizer(vocab)
    end = tokenizer.token_to_id(END_OF_TEXT)
    for section in (document, _text(document)):
        section.update({key: end for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in section})
    _text(document)["eos_token_id"] = end
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json_bytes(tokenizer_config()),
        "generation_config.json": json_bytes({"do_sample": False, "eos_token_id": end}),
    }


def _part(part: Matrix | Vector, specs: tuple[TensorSpec, ...], seed: int, *, zero_centred: bool) -> Part:
    if isinstance(part, Vector):
        return Part(specs, partial(_vector, part, specs[0], seed, zero_centred))
    return Part(specs, partial(_affine if part.group_size else _normal, part, specs, seed))


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))


def _deviation(part: Matrix) -> float:
    """The standard deviation of a matrix's weights that makes its outputs of order one."""
    return 1.0 if part.name == "embed_tokens" else 1 / math.sqrt(part.cols)


def _random(rng: np.random.Generator, nbytes: int) -> Iterator[Array]:
    """``nbytes`` random bytes, uint8, in pieces."""
    for begin in range(0, nbytes, PIECE_NBYTES):
        size = min(PIECE_NBYTES, nbytes - begin)
        yield rng.integers(0, 2**64 - 1, -(-size // 8), dtype=np.uint64, endpoint=True).view(np.uint8)[:size]


def _affine(part: Matrix, specs: tuple[TensorSpec, ...], seed: int) -> Iterator[tuple[str, Array]]:
    """Uniform codes; scales of either sign, a quarter up and down; biases that centre the codes on zero."""
    words, scales, biases = specs
    rng = _generator(seed, part.name)
    largest = 2 ** (4 if part.format == "q4" else 8) - 1
    code_deviation = math.sqrt(((largest + 1) ** 2 - 1) / 12)
    magnitudes = np.linspace(0.75, 1.25, 128) * _deviation(part) / code_deviation
    choices = np.concatenate([magnitudes, -magnitudes])
    scale_of = float32_to_bf16(choices)
    bias_of = float32_to_bf16(-largest / 2 * choices)
    for piece in _random(rng, words.nbytes):
        yield words.name, piece
    for piece in _random(rng, scales.nbytes // 2):
        yield scales.name, scale_of.take(piece)
        yield biases.name, bias_of.take(piece)


@cache
def _quantiles() -> Array:
    """The standard normal distribution cut into 65,536 equally likely parts: the middle of each."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / 65536) for i in range(65536)])


def _normal(part: Matrix, specs: tuple[TensorSpec, ...], seed: int) -> Iterator[tuple[str, Array]]:
    """Normally distributed bfloat16; looking 16 random bits up is several times as fast as computing a normal."""
    value_of = float32_to_bf16(_quantiles() * _deviation(part))
    for piece in _random(_generator(seed, part.name), specs[0].nbytes):
        yield specs[0].name, value_of.take(piece.view(np.uint16))


def _vector(part: Vector, spec: TensorSpec, seed: int, zero_centred: bool) -> Iterator[tuple[str, Array]]:
    rng = _generator(seed, part.name)
    if part.name.endswith(".A_log"):
        values = np.log(rng.uniform(1, 16, part.size))
    elif part.name.endswith(".dt_bias"):
        step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), part.size))
        values = np.log(np.expm1(step))  # softplus of it is the step again
    elif part.name.endswith(".conv1d.weight"):
        values = rng.standard_normal(part.size) / math.sqrt(max(spec.shape[1:]))
    else:
        values = 0.1 * rng.standard_normal(part.size) + (0.0 if zero_centred and is_norm(part) else 1.0)
    yield spec.name, values.astype(np.float32) if spec.dtype == "F32" else float32_to_bf16(values)
