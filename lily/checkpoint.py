"""Safetensors checkpoints: shards mapped once, validated, never copied.

A checkpoint is a directory with ``model.safetensors``, or with shards and usually an index
(``model.safetensors.index.json``), or one ``.safetensors`` file. Whatever bytes the files hold, nothing but
:class:`~lily.errors.CheckpointError` is raised.

The vision tower and the multi-token-prediction head are not part of the text model; their tensors are checked
like any other, then left out and counted in :attr:`Checkpoint.skipped` (model_spec §2).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from lily.errors import CheckpointError
from lily.shard import NUMPY_DTYPES, Shard, TensorInfo, open_shard, parse_json_object

__all__ = ["Checkpoint", "Shard", "TensorInfo", "bf16_to_float32"]

INDEX_NAME = "model.safetensors.index.json"

SKIPPED = re.compile(r"(?:model\.|language_model\.|model\.language_model\.)?(?P<part>vision_tower|visual|mtp)\.")
SKIP_REASONS = {"vision_tower": "vision", "visual": "vision", "mtp": "mtp"}
NUMBERED_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")


class Checkpoint:
    """The tensors of a model, by name.

    Attributes:
        path: the directory or file it was opened from.
        shards: the mapped files, in name order.
        tensors: what the text model may use, by the name in the file.
        skipped: how many tensors were left out, by reason: ``"vision"`` or ``"mtp"``.
    """

    def __init__(
        self,
        path: Path,
        shards: list[Shard],
        tensors: dict[str, TensorInfo],
        skipped: dict[str, int],
    ) -> None:
        self.path = path
        self.shards = shards
        self.tensors = tensors
        self.skipped = skipped

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Map and validate every shard.

        Args:
            path: a checkpoint's directory, or one ``.safetensors`` file.

        Raises:
            CheckpointError: a file is missing or unreadable, a header or the index is malformed or disagrees
                with the files, or a tensor appears twice; the message names the file and, if it is about
                one, the tensor.
        """
        path = Path(path)
        try:
            weight_map = _read_index(path / INDEX_NAME) if (path / INDEX_NAME).is_file() else {}
            files = _shard_files(path, weight_map)
            shards: list[Shard] = []
            tensors: dict[str, TensorInfo] = {}
            for file in files:
                shard, infos = open_shard(file, len(shards))
                shards.append(shard)
                for info in infos:
                    if info.name in tensors:
                        first = shards[tensors[info.name].shard].path
                        raise CheckpointError(
                            f"tensor {info.name!r} is in two shards, {first} and {file.name}; it must be in one"
                        )
                    tensors[info.name] = info
        except OSError as error:
            raise CheckpointError(f"can't read {error.filename or path}: {error.strerror or error}") from error
        opened = {shard.path.name for shard in shards}
        for name, file_name in weight_map.items():
            if file_name not in opened:
                continue  # it holds nothing but tensors that are skipped
            if name not in tensors or shards[tensors[name].shard].path.name != file_name:
                raise CheckpointError(
                    f"{path / INDEX_NAME}: tensor {name!r} should be in {file_name}, which doesn't hold it"
                )
        skipped = Counter(filter(None, map(_skip_reason, {**tensors, **weight_map})))
        kept = {name: info for name, info in tensors.items() if _skip_reason(name) is None}
        return cls(path, shards, kept, dict(skipped))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that were not skipped."""
        return sum(info.nbytes for info in self.tensors.values())

    def info(self, name: str) -> TensorInfo:
        """Where tensor ``name`` lies; raises CheckpointError if the checkpoint has none of that name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing") from None

    def file_of(self, info: TensorInfo) -> Path:
        """The file that holds a tensor, for messages."""
        return self.shards[info.shard].path

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A read-only view of a tensor in the mapping: nothing is copied.

        numpy has no bfloat16 and no 8-bit floats: BF16 comes as uint16 and F8 as uint8, bit patterns. The
        view may be unaligned, as the format aligns nothing.

        Raises:
            CheckpointError: there is no such tensor.
        """
        info = self.info(name)
        raw = self.shards[info.shard].buffer[info.offset : info.offset + info.nbytes]
        return raw.view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)

    def float32(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A float32 copy of a BF16, F16, F32 or F64 tensor, in its own shape.

        Raises:
            CheckpointError: there is no such tensor, or its dtype is not one of the four.
        """
        info = self.info(name)
        array = self.array(name)
        if info.dtype == "BF16":
            return bf16_to_float32(array)
        if info.dtype in ("F16", "F32", "F64"):
            with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, as in any cast
                return array.astype(np.float32)
        raise CheckpointError(f"{self.file_of(info)}: tensor {name!r} is {info.dtype}; expected BF16, F16, F32 or F64")


def bf16_to_float32(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Widen bfloat16 bit patterns (uint16, any shape) to float32; exact."""
    words: np.ndarray[Any, np.dtype[np.uint32]] = bits.astype(np.uint32) << np.uint32(16)
    return words.view(np.float32)


def _skip_reason(name: str) -> str | None:
    match = SKIPPED.match(name)
    return SKIP_REASONS[match["part"]] if match else None


def _read_index(file: Path) -> dict[str, str]:
    """The index's ``weight_map``: tensor name to the shard's file name."""
    index = parse_json_object(file.read_bytes(), file, "the index")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: 'weight_map' must map tensor names to file names")
    for name, shard in weight_map.items():
        # A name with a directory in it could make a downloaded index read any file of the user's.
        if not isinstance(shard, str) or not shard.isprintable() or Path(shard).name != shard:
            raise CheckpointError(f"{file}: tensor {name!r} must name a file beside the index; found {shard!r}")
    return weight_map


def _shard_files(path: Path, weight_map: dict[str, str]) -> list[Path]:
    """The files to map, in name order; raises CheckpointError if one of a set is missing."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or directory")
    if weight_map:
        holds = {shard: name for name, shard in weight_map.items() if _skip_reason(name) is None}
        for shard in sorted(holds):
            if not (path / shard).is_file():
                raise CheckpointError(
                    f"{path / shard} is missing; the index says that it holds tensor {holds[shard]!r}"
                )
        return [path / shard for shard in sorted(holds)]
    files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path}: no *.safetensors file in this directory")
    names = {file.name for file in files}
    for file in files:
        if numbered := NUMBERED_SHARD.fullmatch(file.name):
            stem, total = numbered["stem"], numbered["total"]
            for number in range(1, int(total) + 1):
                sibling = f"{stem}-{number:05d}-of-{total}.safetensors"
                if sibling not in names:
                    raise CheckpointError(f"{path / sibling} is missing; {file.name} is one of {int(total)}")
    return files
