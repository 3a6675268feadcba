"""What ``generation_config.json`` says: how to sample, and what ends a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily.errors import ConfigError
from lily.json_file import read_json_object, shown
from lily.sampling import LEGAL

__all__ = ["GENERATION_CONFIG", "GenerationDefaults", "checked_token_ids", "load_generation_config"]

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """What ``generation_config.json`` asks for; ``None`` where it is silent."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    do_sample: bool | None = None
    eos_ids: tuple[int, ...] = ()


def load_generation_config(model_dir: str | Path) -> GenerationDefaults:
    """Reads ``generation_config.json``, as far as it is of use here; without one, no defaults.

    Raises:
        ConfigError: the file is malformed; the message names the file, the key and the value.
    """
    path = Path(model_dir) / GENERATION_CONFIG
    document = read_json_object(path) or {}
    values: dict[str, Any] = {}
    for key, legal in LEGAL.items():
        value = document.get(key)
        if key == "seed" or value is None:
            continue
        if not legal.admits(value):
            raise ConfigError(f"{path}: {key} is {shown(value)}; it must be {legal}")
        values[key] = int(value) if legal.integer else float(value)
    do_sample = document.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ConfigError(f"{path}: do_sample is {shown(do_sample)}; it must be true or false")
    eos = document.get("eos_token_id")
    eos_ids = () if eos is None else checked_token_ids(eos, f"{path}: eos_token_id")
    return GenerationDefaults(**values, do_sample=do_sample, eos_ids=eos_ids)


def checked_token_ids(value: object, source: str) -> tuple[int, ...]:
    """An ``eos_token_id``, one or several, as a tuple.

    Raises:
        ConfigError: it is not an id or a list of ids; the message begins with ``source``.
    """
    ids: list[Any] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in ids):
        raise ConfigError(f"{source} is {shown(value)}; it must be a token id or a list of token ids")
    return tuple(ids)
