"""Fetching a checkpoint, from a hub that is a directory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from checkpoints import huggingface_tensors, mlx_tensors, random_model, save, tiny_config, to_f32
from commands import lily as run

from lily.byte_tokenizer import byte_tokenizer
from lily.errors import CheckpointError, ConfigError, UsageError
from lily.pull import PullError, pull

CONFIG = tiny_config(vocab_size=300)


class HFValidationError(ValueError):
    pass


class RepositoryNotFoundError(OSError):
    pass


class GatedRepoError(RepositoryNotFoundError):
    pass


class RevisionNotFoundError(OSError):
    pass


class LocalEntryNotFoundError(FileNotFoundError):
    pass


class Hub:
    """Stands in for ``huggingface_hub``: the names, arguments and errors of it that Lily knows."""

    def __init__(self, directory: Path, cache: Path) -> None:
        self.directory = directory
        self.cache = cache
        self.calls: list[dict[str, Any]] = []
        self.fetched: list[list[str]] = []
        self.bars = True
        self.bars_in_calls: list[bool] = []
        self.fails: Callable[[], None] = lambda: None

    def snapshot_download(
        self,
        repo_id: str,
        *,
        revision: str | None,
        local_dir: Path | None,
        allow_patterns: list[str],
        ignore_patterns: list[str],
    ) -> str:
        """Copies what matches and isn't there yet."""
        self.calls.append({"repo_id": repo_id, "revision": revision, "local_dir": local_dir})
        self.bars_in_calls.append(self.bars)
        self.fails()
        target = local_dir or self.cache
        (target / ".cache" / "huggingface").mkdir(parents=True, exist_ok=True)
        fetched = []
        for file in sorted(path for path in self.directory.rglob("*") if path.is_file()):
            name = str(file.relative_to(self.directory))
            wanted = any(fnmatch(name, pattern) for pattern in allow_patterns)
            if wanted and not any(fnmatch(name, pattern) for pattern in ignore_patterns):
                fetched.append(name)
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                if not (target / name).exists():
                    (target / name).write_bytes(file.read_bytes())
        self.fetched.append(fetched)
        return str(target)

    def set_bars(self, shown: bool) -> None:
        self.bars = shown


def modules(hub: Hub) -> dict[str, ModuleType]:
    package, errors, bars = map(ModuleType, ("huggingface_hub", "huggingface_hub.errors", "huggingface_hub.utils.tqdm"))
    vars(package).update(snapshot_download=hub.snapshot_download, __path__=[])
    for error in (
        HFValidationError,
        RepositoryNotFoundError,
        GatedRepoError,
        RevisionNotFoundError,
        LocalEntryNotFoundError,
    ):
        setattr(errors, error.__name__, error)
    vars(bars).update(
        are_progress_bars_disabled=lambda: not hub.bars,
        disable_progress_bars=lambda: hub.set_bars(False),
        enable_progress_bars=lambda: hub.set_bars(True),
    )
    return {module.__name__: module for module in (package, errors, bars)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A repository with a checkpoint and much else."""
    repository = tmp_path / "hub"
    save(repository, CONFIG, mlx_tensors(random_model(CONFIG)), shards=2)
    byte_tokenizer(300).save(str(repository / "tokenizer.json"))
    for name in ("chat_template.jinja", "LICENSE"):
        (repository / name).write_text("text")
    (repository / "generation_config.json").write_text("{}")
    for name in ("README.md", "model.gguf", "pytorch_model.bin", "onnx/model.safetensors", "onnx/config.json"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("not wanted")
    fake = Hub(repository, tmp_path / "cache")
    for name, module in modules(fake).items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


WANTED = [
    "LICENSE",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
]


def test_only_what_is_needed_is_fetched_and_the_small_files_first(hub: Hub, tmp_path: Path) -> None:
    pulled = pull("owner/name", tmp_path / "model", revision="v2")
    assert hub.fetched == [[name for name in WANTED if not name.endswith(".safetensors")], WANTED]
    assert hub.calls == [{"repo_id": "owner/name", "revision": "v2", "local_dir": tmp_path / "model"}] * 2
    assert pulled.path == tmp_path / "model"
    assert pulled.tensors == len(mlx_tensors(random_model(CONFIG)))
    assert pulled.nbytes > 0
    assert pulled.skipped == {}


def test_without_a_destination_it_is_the_librarys_cache(hub: Hub) -> None:
    assert pull("owner/name").path == hub.cache
    assert hub.calls[0]["local_dir"] is None
    assert hub.calls[0]["revision"] is None


def test_an_interrupted_pull_goes_on_in_its_directory(hub: Hub, tmp_path: Path) -> None:
    def interrupt() -> None:
        if len(hub.calls) == 2:
            raise KeyboardInterrupt

    hub.fails = interrupt
    with pytest.raises(KeyboardInterrupt):
        pull("owner/name", tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()
    pull("owner/name", tmp_path / "model")


@pytest.mark.parametrize("shown", [True, False])
def test_the_librarys_bars_are_shown_when_asked_for_and_come_back(hub: Hub, tmp_path: Path, shown: bool) -> None:
    pull("owner/name", tmp_path / "model", show_progress=shown)
    assert hub.bars_in_calls == [shown, shown]
    assert hub.bars
    hub.bars = False  # as HF_HUB_DISABLE_PROGRESS_BARS does
    pull("owner/name", tmp_path / "model", show_progress=shown)
    assert not hub.bars


def test_a_model_that_lily_cannot_run_is_refused_before_its_weights(hub: Hub, tmp_path: Path) -> None:
    (hub.directory / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r'model_type is "llama"'):
        pull("owner/name", tmp_path / "model")
    assert len(hub.calls) == 1


def test_a_repository_without_a_model(hub: Hub, tmp_path: Path) -> None:
    (hub.directory / "config.json").unlink()
    with pytest.raises(UsageError, match=r"owner/name holds no config\.json; expected a model's safetensors"):
        pull("owner/name", tmp_path / "model")


def test_damaged_files_are_found(hub: Hub, tmp_path: Path) -> None:
    shard = hub.directory / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: truncated"):
        pull("owner/name", tmp_path / "one")
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        pull("owner/name", tmp_path / "two")
    shard.write_bytes(whole)
    byte_tokenizer(400).save(str(hub.directory / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="beyond the model's vocabulary of 300 rows"):
        pull("owner/name", tmp_path / "three")
    (hub.directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        pull("owner/name", tmp_path / "four")


def test_unused_tensors_are_counted(hub: Hub, tmp_path: Path) -> None:
    tensors = huggingface_tensors(random_model(CONFIG)) | {"mtp.fc.weight": to_f32(np.ones(3))}
    for file in hub.directory.glob("model*"):
        file.unlink()
    save(hub.directory, tiny_config(vocab_size=300, quantization=None), tensors)
    assert pull("owner/name", tmp_path / "model").skipped == {"mtp": 1}


def unreachable() -> None:
    try:
        raise ConnectionError("no route to host\nand more")
    except ConnectionError as error:
        raise LocalEntryNotFoundError("an error happened, and it is not in the cache") from error


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fails", "kind", "message"),
    [
        (raising(HFValidationError("x")), UsageError, "'owner/name' can't be a repository of the hub; expected OWNER"),
        (raising(RepositoryNotFoundError("x")), PullError, "the hub has no model owner/name, or it is private"),
        (raising(GatedRepoError("x")), PullError, "owner/name is gated; accept its terms"),
        (raising(RevisionNotFoundError("x")), PullError, "owner/name has no revision 'v2'"),
        (unreachable, PullError, "can't fetch owner/name: no route to host; the same command goes on from what"),
        (raising(RuntimeError("")), PullError, "can't fetch owner/name: RuntimeError; "),
        (raising(OSError(28, "No space left on device")), PullError, "No space left on device; "),
    ],
)
def test_what_fails_is_one_sentence(
    hub: Hub, tmp_path: Path, fails: Callable[[], None], kind: type[Exception], message: str
) -> None:
    hub.fails = fails
    with pytest.raises(kind, match=message) as raised:
        pull("owner/name", tmp_path / "model", revision="v2")
    assert "\n" not in str(raised.value)
    assert hub.bars


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PullError, match=r"pip install 'lily\[hub\]'"):
        pull("owner/name")


def test_a_directory_of_something_else_is_left_alone(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").touch()
    with pytest.raises(UsageError, match="notes holds something else already"):
        pull("owner/name", tmp_path / "notes")
    with pytest.raises(UsageError, match=r"diary\.txt is a file; give a directory"):
        pull("owner/name", tmp_path / "notes" / "diary.txt")
    (tmp_path / "empty").mkdir()
    pull("owner/name", tmp_path / "empty")
    assert len(hub.calls) == 2


def test_the_command(hub: Hub, tmp_path: Path) -> None:
    done = run("pull", "owner/name", str(tmp_path / "model"))
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{tmp_path / 'model'}: ")
    done = run("pull", "owner/name", "--revision", "v2", "--json")
    assert done.json.keys() == {"path", "bytes", "tensors", "seconds", "skipped"}
    assert done.json["path"] == str(hub.cache)
    assert hub.calls[-1]["revision"] == "v2"
    assert hub.bars_in_calls == [False] * 4  # standard error is no terminal here
    hub.fails = unreachable
    done = run("pull", "owner/name")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("lily: can't fetch owner/name: no route to host")
    assert "lily pull mlx-community/" in run("pull", "--help").out
