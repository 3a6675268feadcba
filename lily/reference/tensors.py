"""The oracle's own checkpoint reader: every text tensor dense, in float64, under one set of names.

It shares nothing with the engine's loader, so that the two can be held against each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from lily.errors import CheckpointError, ConfigError
from lily.reference.bfloat16 import as_float64
from lily.reference.dense import dequantize

__all__ = ["read_config", "read_tensors"]

Array = NDArray[np.float64]

_DTYPES = {
    "BF16": np.uint16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "U32": np.uint32,
}
_SKIPPED = re.compile(r"^(model\.|language_model\.)?(mtp|visual|vision_tower)\.")
_PREFIX = re.compile(r"^(language_model\.model\.|model\.language_model\.|language_model\.|model\.)")
_ZERO_CENTRED = re.compile(r"(^norm|input_layernorm|post_attention_layernorm|q_norm|k_norm)$")


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint directory as it stands.

    Raises:
        ConfigError: the file is missing or isn't a JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, not a JSON object")
    return config


def read_tensors(directory: Path, config: Mapping[str, Any]) -> dict[str, Array]:
    """All text tensors of a checkpoint in MLX or Hugging Face layout (model specification §2).

    Names lose their prefix and a trailing ``.weight``: ``embed_tokens``,
    ``layers.0.mlp.switch_mlp.up_proj``. Norms are multipliers (1 + w), ``conv1d`` is [C, taps],
    experts are ``switch_mlp.{gate,up,down}_proj`` [E, ·, ·].

    Raises:
        CheckpointError: no file, an unreadable file, or an unknown dtype.
    """
    stored = dict(_stored(directory))
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    convolutions = [array for name, array in stored.items() if name.endswith("conv1d.weight")]
    zero_centred = any(array.shape[-1] != 1 for array in convolutions)
    tensors: dict[str, Array] = {}
    for name, array in stored.items():
        path = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{path}.scales" in stored:
            override = quantization.get(path)
            settings = override if isinstance(override, Mapping) else quantization
            scales, biases = stored[f"{path}.scales"], stored[f"{path}.biases"]
            values = dequantize(array, scales, biases, settings["bits"], settings["group_size"])
        else:
            values = as_float64(array)
        tensors.update(_canonical(_PREFIX.sub("", path), values, zero_centred))
    return tensors


def _stored(directory: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no .safetensors file")
    for file in files:
        try:
            entries = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} can't be read: {error}") from error
        for name, entry in entries:
            if _SKIPPED.match(name):
                continue
            dtype = entry["dtype"]
            if dtype not in _DTYPES:
                known = ", ".join(_DTYPES)
                raise CheckpointError(f"{file}: tensor {name} is {dtype}; known types: {known}")
            yield name, np.frombuffer(entry["data"], _DTYPES[dtype]).reshape(entry["shape"])


def _canonical(path: str, values: Array, zero_centred: bool) -> dict[str, Array]:
    if path.endswith("conv1d"):
        return {path: values.reshape(values.shape[0], -1)}
    if path.endswith("mlp.experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        layer = path.removesuffix("experts.gate_up_proj")
        return {f"{layer}switch_mlp.gate_proj": gate, f"{layer}switch_mlp.up_proj": up}
    if path.endswith("mlp.experts.down_proj"):
        return {path.replace(".experts.", ".switch_mlp."): values}
    if zero_centred and _ZERO_CENTRED.search(path):
        return {path: 1.0 + values}
    return {path: values}
