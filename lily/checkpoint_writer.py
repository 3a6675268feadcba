"""A whole model's directory, written at once: configuration, tokenizer, shards."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lily.checkpoint import Checkpoint
from lily.config import load_config
from lily.layout import bind
from lily.output_directory import output_directory
from lily.progress import SILENT, Progress
from lily.shard_writer import Shards

__all__ = [
    "COMPANIONS",
    "COMPANION_PATTERNS",
    "SHARD_NBYTES",
    "Written",
    "companion_files",
    "json_bytes",
    "write_checkpoint",
]

SHARD_NBYTES = 5_000_000_000

COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
COMPANION_PATTERNS = ("LICENSE*", "NOTICE*")


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        path: the model's directory.
        nbytes: bytes of all tensors.
        tensors: how many there are.
        parameters: of the model.
        shards: ``.safetensors`` files.
        seconds: from the first byte to the last, flushed to the disk.
        skipped: tensors of the source that were left out, by reason.
    """

    path: Path
    nbytes: int
    tensors: int
    parameters: int
    shards: int
    seconds: float
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def bits_per_weight(self) -> float:
        """Bits that a parameter takes, scales and all."""
        return 8 * self.nbytes / self.parameters


def write_checkpoint(
    destination: Path,
    shards: Shards,
    files: Mapping[str, bytes | Path],
    *,
    force: bool = False,
    skipped: Mapping[str, int] | None = None,
    progress: Progress = SILENT,
) -> Written:
    """Write a model's directory, all or nothing, and read its headers back before it takes its place.

    Args:
        files: everything but the shards, ``config.json`` among them: content, or a file to copy.
        force: replace what is there, as :func:`lily.output_directory.check_destination` allows.
        skipped: for the result.

    Raises:
        UsageError: there is something at ``destination`` that must not be replaced.
        OutputError: there is no room, or writing failed.
    """
    started = time.perf_counter()
    contents = {name: file.stat().st_size if isinstance(file, Path) else len(file) for name, file in files.items()}
    with output_directory(destination, nbytes=shards.nbytes + sum(contents.values()), force=force) as directory:
        progress.begin(shards.tensor_nbytes, len(shards.tensors))
        for name, file in files.items():
            (directory / name).write_bytes(file.read_bytes() if isinstance(file, Path) else file)
        shards.write(directory, progress.advance)
        bind(Checkpoint.open(directory), load_config(directory))
    return Written(
        path=destination,
        nbytes=shards.tensor_nbytes,
        tensors=len(shards.tensors),
        parameters=shards.parameters,
        shards=len(shards.files),
        seconds=time.perf_counter() - started,
        skipped=skipped or {},
    )


def companion_files(directory: Path) -> dict[str, Path]:
    """What belongs to a model besides weights and configuration, by name: tokenizer, template, licence."""
    files = [directory / name for name in COMPANIONS]
    files += [path for pattern in COMPANION_PATTERNS for path in sorted(directory.glob(pattern))]
    return {path.name: path for path in files if path.is_file()}


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """A JSON file's content."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
