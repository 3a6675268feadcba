"""A model's directory, written at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import huggingface_tensors, random_model, tiny_config

from lily.checkpoint_writer import companion_files, json_bytes, write_checkpoint
from lily.errors import CheckpointError
from lily.shard_writer import Part, Shards, TensorSpec

CONFIG = tiny_config(quantization=None)


def shards(*, without: str = "") -> Shards:
    parts = [
        Part(
            (TensorSpec(name, tensor.dtype, tensor.array.shape),),
            lambda name=name, tensor=tensor: [(name, tensor.array)],
        )
        for name, tensor in huggingface_tensors(random_model(CONFIG)).items()
        if name != without
    ]
    return Shards(parts, 10**9, 1000, "pt")


class Counter:
    def __init__(self) -> None:
        self.expected = (0, 0)
        self.done = np.zeros(2, np.int64)

    def begin(self, nbytes: int, tensors: int) -> None:
        self.expected = (nbytes, tensors)

    def advance(self, nbytes: int, tensors: int) -> None:
        self.done += (nbytes, tensors)


def test_files_shards_and_figures(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("terms")
    progress, planned = Counter(), shards()
    written = write_checkpoint(
        tmp_path / "model",
        planned,
        {"config.json": json_bytes(CONFIG), "LICENSE": tmp_path / "LICENSE"},
        skipped={"mtp": 3},
        progress=progress,
    )
    assert {path.name for path in written.path.iterdir()} == {"LICENSE", "config.json", "model.safetensors"}
    assert json.loads((written.path / "config.json").read_text()) == CONFIG
    assert (written.path / "LICENSE").read_text() == "terms"
    assert (written.nbytes, written.tensors) == (planned.tensor_nbytes, len(planned.tensors)) == progress.expected
    assert tuple(progress.done) == progress.expected
    assert (written.parameters, written.shards, written.skipped) == (1000, 1, {"mtp": 3})
    assert written.bits_per_weight == planned.tensor_nbytes * 8 / 1000


def test_what_cannot_be_read_back_is_not_put_in_place(tmp_path: Path) -> None:
    incomplete = shards(without="lm_head.weight")
    with pytest.raises(CheckpointError, match="lm_head"):
        write_checkpoint(tmp_path / "model", incomplete, {"config.json": json_bytes(CONFIG)})
    assert list(tmp_path.iterdir()) == []


def test_companions_are_tokenizer_template_and_licence(tmp_path: Path) -> None:
    wanted = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE.txt"}
    for name in (*wanted, "config.json", "model.safetensors", "README.md", "modeling_qwen.py", "vision.json"):
        (tmp_path / name).touch()
    assert companion_files(tmp_path) == {name: tmp_path / name for name in wanted}
