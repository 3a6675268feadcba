"""Finding a model by name or path."""

from __future__ import annotations

from pathlib import Path

import pytest

from lily.catalog import BUILTIN, DEFAULT, find_model
from lily.config import load_config
from lily.errors import UsageError
from tests.checkpoints import DEMO, mlx_tensors, random_model, save, tiny_config


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "my-model", tiny_config(), mlx_tensors(random_model(tiny_config())))


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_models_have_a_configuration_that_loads(name: str) -> None:
    found = find_model(name)
    assert found.builtin
    assert found.name == name
    assert load_config(found.path).hidden_size > 0


def test_the_default_has_weights() -> None:
    found = find_model(weights=True)
    assert (found.name, found.path, found.weights) == (DEFAULT, DEMO, DEMO)


def test_names_ignore_case() -> None:
    assert find_model("Qwen3.6-35B-A3B").name == "qwen3.6-35b-a3b"


def test_a_configuration_only_model_says_so_when_weights_are_needed() -> None:
    assert find_model("qwen3.6-35b-a3b").weights is None
    with pytest.raises(UsageError, match=r"qwen3\.6-35b-a3b comes as a configuration without weights"):
        find_model("qwen3.6-35b-a3b", weights=True)


def test_a_directory_its_configuration_or_its_file(checkpoint: Path) -> None:
    for path, weights in (
        (checkpoint, checkpoint),
        (str(checkpoint), checkpoint),
        (checkpoint / "config.json", checkpoint),
        (checkpoint / "model.safetensors", checkpoint / "model.safetensors"),
    ):
        found = find_model(path, weights=True)
        assert (found.name, found.path, found.weights, found.builtin) == ("my-model", checkpoint, weights, False)


def test_a_directory_named_like_a_builtin_is_reached_by_its_path(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.rename(checkpoint.parent / "demo")
    monkeypatch.chdir(checkpoint.parent)
    assert find_model("demo").builtin
    assert not find_model("./demo").builtin


def test_home_is_expanded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    monkeypatch.setenv("USERPROFILE", str(checkpoint.parent))
    assert find_model("~/my-model").path == checkpoint


@pytest.mark.parametrize(("asked", "meant"), [("dmeo", "demo"), ("qwen3.6", "qwen3.6-35b-a3b")])
def test_the_nearest_builtin_name(asked: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf'no model "{asked}": .*; did you mean {meant}\?'):
        find_model(asked)


def test_the_nearest_path(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean .*/my-model\?"):
        find_model(checkpoint.parent / "my-modle")


def test_nothing_near_lists_the_builtin_names() -> None:
    with pytest.raises(UsageError, match=r"built-in are demo and qwen3\.6-35b-a3b"):
        find_model("/nowhere/xyzzy")


@pytest.mark.parametrize("asked", ["", "\0", "x" * 5000, "~nobody-of-this-name/model"])
def test_what_can_not_be_a_path(asked: str) -> None:
    with pytest.raises(UsageError, match="no model"):
        find_model(asked)


def test_a_directory_of_models_points_inside(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no config\.json; .*did you mean .*/my-model\?"):
        find_model(checkpoint.parent)


def test_a_directory_without_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert find_model(checkpoint).weights is None
    with pytest.raises(UsageError, match=r"my-model holds no \*\.safetensors file"):
        find_model(checkpoint, weights=True)


def test_a_file_that_is_no_model(checkpoint: Path) -> None:
    other = checkpoint / "notes.txt"
    other.write_text("hello")
    with pytest.raises(UsageError, match=r"notes\.txt is not a model; expected a directory"):
        find_model(other)
