"""From Hugging Face's layout to MLX's, quantized: the files that ``mlx_lm.convert`` writes (model_spec §2, §3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lily.catalog import Model, find_model
from lily.checkpoint import Checkpoint
from lily.checkpoint_writer import SHARD_NBYTES, Written, companion_files, json_bytes, write_checkpoint
from lily.config import ModelConfig, parse_config
from lily.errors import CheckpointError, ConfigError, UsageError
from lily.json_file import read_json_object, shown
from lily.layout import (
    DROPPED_KEYS,
    QUANTIZATION_KEYS,
    bind,
    is_norm,
    mlx_parts,
    mlx_tensors,
    quantization_section,
    with_quantization,
)
from lily.matrix import Matrix, Vector
from lily.output_directory import check_destination
from lily.progress import SILENT, Progress
from lily.quantize import blocks, float32_to_bf16, quantize, to_float32
from lily.shard_writer import Part, Shards, TensorSpec
from lily.tensors import HUGGING_FACE, CheckpointTensors

__all__ = ["DTYPES", "convert"]

Array: TypeAlias = np.ndarray[Any, Any]

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    bits: int = 4,
    group_size: int = 64,
    gate_bits: int = 8,
    shard_nbytes: int = SHARD_NBYTES,
    dtype: str | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> Written:
    """Quantize a checkpoint, tensor by tensor; memory is a few times the largest one.

    Vision and multi-token-prediction tensors are left out and counted in the result. The tokenizer, the chat
    template and ``generation_config.json`` are copied.

    Args:
        source: an unquantized model's directory, in either layout.
        destination: a directory that doesn't exist; it appears whole or not at all.
        bits: of every matrix but the gates, 4 or 8.
        group_size: weights that share a scale and a bias: 32, 64 or 128.
        gate_bits: of the router and the shared expert's gate, 4 or 8.
        shard_nbytes: at most so large is a file, if its tensors allow it.
        dtype: of scales, norms and the like: ``"bfloat16"``, ``"float16"`` or ``"float32"``; weights are rounded to
            it before they are quantized, as MLX does. None takes the configuration's.
        force: replace ``destination``.

    Raises:
        UsageError: the source is quantized already or isn't there, an argument is not one of those above, or
            ``destination`` is in the way.
        ConfigError: the configuration is malformed or not of this family.
        CheckpointError: the source's tensors are not those of its configuration, or hold NaN or infinity.
        OutputError: there is no room, or writing failed.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"can't convert to dtype {shown(dtype)}; expected {' or '.join(DTYPES)}")
    found = find_model(source, weights=True)
    destination = check_destination(Path(destination), force=force)
    if destination == found.path.resolve():
        raise UsageError(f"{destination} is the source itself; give another destination")
    document = _unquantized_config(found)
    config = parse_config(document, str(found.path / "config.json"))
    checkpoint = Checkpoint.open(found.weights or found.path)
    tensors, bound = bind(checkpoint, config)
    if config.tie_word_embeddings:
        _check_tied(tensors)

    document = with_quantization(document, quantization_section(config, bits, group_size, gate_bits))
    stored = checkpoint.info(tensors.names["embed_tokens.weight"]).dtype
    target = DTYPES[dtype] if dtype else _configured_dtype(document, stored)
    converted = parse_config(document, config.source)
    parts = [
        Part(specs, partial(_pieces, part, specs, tensors))
        for part in mlx_parts(converted)
        for specs in [_specs(part, converted, target, tensors)]
    ]
    parameters = sum(part.size for part in bound.values())
    return write_checkpoint(
        destination,
        Shards(parts, shard_nbytes, parameters, "mlx"),
        {"config.json": json_bytes(document), **companion_files(found.path)},
        force=force,
        skipped=checkpoint.skipped,
        progress=progress,
    )


def _unquantized_config(found: Model) -> dict[str, Any]:
    """``config.json`` without what a conversion drops."""
    file = found.path / "config.json"
    document = read_json_object(file)
    if document is None:
        raise ConfigError(f"{file}: no such file; a model's directory holds its config.json")
    text = document.get("text_config")
    for section in (document, text if isinstance(text, Mapping) else {}):
        for key in QUANTIZATION_KEYS:
            if section.get(key) is not None:
                settings = section[key]
                how = [
                    f"{name} {settings[name]}"
                    for name in ("quant_method", "bits", "group_size")
                    if isinstance(settings, Mapping) and name in settings
                ]
                raise UsageError(
                    f"{found.path} is quantized already ({', '.join(how) or key}); convert takes a checkpoint in "
                    "bfloat16, float16 or float32"
                )
    return {key: value for key, value in document.items() if key not in DROPPED_KEYS}


def _configured_dtype(document: Mapping[str, Any], stored: str) -> str:
    """The dtype that the configuration gives, or else that of the embedding in the source."""
    text = document.get("text_config")
    for section in (document, text if isinstance(text, Mapping) else {}):
        for key in ("torch_dtype", "dtype"):
            if section.get(key) in DTYPES:
                return DTYPES[section[key]]
    return stored


def _check_tied(tensors: CheckpointTensors) -> None:
    """A tied model may store its output matrix, which is not written again, if it is the input matrix."""
    checkpoint, head = tensors.checkpoint, tensors.names.get("lm_head.weight")
    if head is None:
        return
    embedding = tensors.names["embed_tokens.weight"]
    if not np.array_equal(checkpoint.array(head), checkpoint.array(embedding)):
        raise CheckpointError(
            f"{checkpoint.path}: tensor {head!r} differs from {embedding!r}, but tie_word_embeddings is true in "
            f"{tensors.config.source}"
        )


def _specs(
    part: Matrix | Vector, config: ModelConfig, dtype: str, tensors: CheckpointTensors
) -> tuple[TensorSpec, ...]:
    specs = mlx_tensors(part, config, dtype)
    if part.name.endswith(".A_log"):
        # MLX never casts it (model_spec §2); it knows no float64, though.
        stored = tensors.checkpoint.info(tensors.names[part.name]).dtype
        return (replace(specs[0], dtype="F32" if stored == "F64" else stored),)
    return specs


def _pieces(
    part: Matrix | Vector, specs: tuple[TensorSpec, ...], tensors: CheckpointTensors
) -> Iterator[tuple[str, Array]]:
    """The bytes of a part's tensors."""
    names = _source_names(part, tensors)
    info = tensors.checkpoint.info(names[0])
    where = f"{tensors.checkpoint.file_of(info)}: tensor {info.name!r}"
    values = _values(part, names, tensors)
    dtype = specs[-1].dtype
    if isinstance(part, Vector):
        if is_norm(part) and tensors.layout == HUGGING_FACE:
            # Rounded to the source's own dtype before any cast, as MLX does.
            values = _cast(to_float32(values) + np.float32(1), "F32" if info.dtype == "F64" else info.dtype, where)
        yield specs[0].name, _cast(values, dtype, where)
        return
    if dtype != info.dtype or not part.group_size:
        values = _cast(values, dtype, where)
    if part.group_size:
        packed = quantize(values, 4 if part.format == "q4" else 8, part.group_size, name=where)
        yield from zip((spec.name for spec in specs), packed, strict=True)
    else:
        yield specs[0].name, values


def _source_names(part: Matrix | Vector, tensors: CheckpointTensors) -> list[str]:
    """The tensor that holds a part, or one for each expert."""
    names, path = tensors.names, part.name
    if isinstance(part, Vector):
        return [names[path]]
    if f"{path}.weight" in names:
        return [names[f"{path}.weight"]]
    mixture, _, projection = path.partition(".switch_mlp.")
    fused = f"{mixture}.experts.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"
    if fused in names:
        return [names[fused]]
    return [names[f"{mixture}.experts.{i}.{projection}.weight"] for i in range(part.experts)]


def _values(part: Matrix | Vector, names: list[str], tensors: CheckpointTensors) -> Array:
    """A part as the source has it; a view, unless experts have to be stacked."""
    arrays = [tensors.checkpoint.array(name) for name in names]
    if len(arrays) > 1:
        return np.stack(arrays)
    if isinstance(part, Matrix) and names[0].endswith(".gate_up_proj"):
        first = 0 if part.name.endswith(".gate_proj") else part.rows
        return arrays[0][:, first : first + part.rows]
    return arrays[0]


def _cast(values: Array, dtype: str, where: str) -> Array:
    """A copy in another float dtype, made in blocks so that no float32 copy of a large tensor is held.

    Raises:
        CheckpointError: a value is NaN or infinite, before or after.
    """
    cast = np.empty(values.shape, {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[dtype])
    for block in blocks(values):
        with np.errstate(over="ignore"):  # becomes infinite, and is refused below
            wide = to_float32(values[block])
            # Rounding to bfloat16 could turn a NaN into a number, so that is looked at first.
            if not np.isfinite(wide).all():
                raise CheckpointError(f"{where} holds NaN or infinity; it can't be converted")
            cast[block] = float32_to_bf16(wide) if dtype == "BF16" else wide
        if not np.isfinite(to_float32(cast[block])).all():
            raise CheckpointError(f"{where} holds {np.abs(wide).max():.6g}, which is beyond {dtype}")
    return cast
