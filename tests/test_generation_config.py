"""generation_config.json: defaults of sampling and the ends of a generation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lily
from lily.errors import ConfigError
from lily.generation_config import GenerationDefaults, load_generation_config

DEMO = Path(lily.__file__).parent / "models" / "demo"


def test_the_demo_models_defaults() -> None:
    assert load_generation_config(DEMO) == GenerationDefaults(
        temperature=0.7, top_k=20, top_p=0.95, do_sample=True, eos_ids=(4002, 4000)
    )


def test_no_file_means_no_defaults(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path) == GenerationDefaults()


def test_null_is_silence_and_other_keys_are_of_no_concern(tmp_path: Path) -> None:
    write(tmp_path, {"top_k": None, "do_sample": None, "eos_token_id": None, "seed": "x", "x": 1})
    assert load_generation_config(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 8], (7, 8)), ([], ())])
def test_one_eos_or_several(tmp_path: Path, value: object, ids: tuple[int, ...]) -> None:
    write(tmp_path, {"eos_token_id": value})
    assert load_generation_config(tmp_path).eos_ids == ids


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "0.7"),
        ("temperature", float("nan")),
        ("top_k", 2.5),
        ("top_p", 0),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("do_sample", 1),
        ("eos_token_id", -1),
        ("eos_token_id", "<|im_end|>"),
        ("eos_token_id", [4002, "x"]),
        ("eos_token_id", [True]),
    ],
)
def test_a_wrong_value_is_named_with_file_and_key(tmp_path: Path, key: str, value: object) -> None:
    write(tmp_path, {key: value})
    with pytest.raises(ConfigError) as raised:
        load_generation_config(tmp_path)
    message = str(raised.value)
    assert f"generation_config.json: {key} is {json.dumps(value)}; it must be " in message


def write(directory: Path, document: object) -> None:
    (directory / "generation_config.json").write_text(json.dumps(document), encoding="utf-8")
