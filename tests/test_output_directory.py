"""A directory that appears whole or not at all, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

import lily.output_directory
from lily.errors import UsageError
from lily.output_directory import OutputError, check_destination, output_directory


def model(directory: Path, content: str = "before") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(content)
    return directory


def write(destination: Path, *, force: bool = False, happens: Callable[[], None] = lambda: None) -> None:
    with output_directory(destination, nbytes=100, force=force) as directory:
        (directory / "config.json").write_text("after")
        happens()
        (directory / "weights").write_text("after")


def raising(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_it_appears_at_the_end_and_nothing_else_does(tmp_path: Path) -> None:
    destination = tmp_path / "model"
    with output_directory(destination, nbytes=100) as directory:
        (directory / "config.json").write_text("after")
        assert not destination.exists()
        assert directory.parent == tmp_path  # the same disk, or a rename would copy
    assert names(tmp_path) == ["model"]
    assert (destination / "config.json").read_text() == "after"
    (tmp_path / "plain").mkdir()
    assert destination.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed twice"])
def test_force_replaces_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(lily.output_directory, "_exchange", lambda one, other: False)
    destination = model(tmp_path / "model")
    (destination / "old").touch()
    write(destination, force=True)
    assert names(tmp_path) == ["model"]
    assert names(destination) == ["config.json", "weights"]
    assert (destination / "weights").read_text() == "after"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        (raising(ValueError("no")), ValueError),
        (raising(KeyboardInterrupt()), KeyboardInterrupt),
        (terminated, SystemExit),
        (raising(OSError(errno.ENOSPC, "No space left on device")), OutputError),
    ],
    ids=["error", "Ctrl-C", "kill", "disk full"],
)
def test_what_fails_leaves_nothing(
    tmp_path: Path, happens: Callable[[], None], expected: type[BaseException], force: bool
) -> None:
    destination = tmp_path / "model"
    if force:
        model(destination)
    with pytest.raises(expected):
        write(destination, force=force, happens=happens)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert names(tmp_path) == (["model"] if force else [])
    if force:
        assert (destination / "config.json").read_text() == "before"


def test_a_failing_second_rename_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = model(tmp_path / "model")
    rename, calls = os.rename, 0

    def second_fails(one: Path, other: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(one, other)

    monkeypatch.setattr(lily.output_directory, "_exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OutputError, match="Input/output error"):
        write(destination, force=True)
    assert names(tmp_path) == ["model"]
    assert (destination / "config.json").read_text() == "before"


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, 5 * 10**9))
    message = r"model will take 19\.51 GB, but only 5\.00 GB are free on that disk"
    with pytest.raises(OutputError, match=message), output_directory(tmp_path / "model", nbytes=19_510_000_000):
        raise AssertionError("the block ran")
    assert names(tmp_path) == []


def test_a_failing_disk_is_one_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"can't write .*/model: No space left on device; nothing of it is left"),
        output_directory(tmp_path / "model", nbytes=1),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model exists already; give another name, or --force"):
        write(model(tmp_path / "model"))
    assert (tmp_path / "model" / "config.json").read_text() == "before"


def test_force_only_replaces_a_model(tmp_path: Path) -> None:
    """``--force ~`` must not cost anyone their home directory."""
    (tmp_path / "file").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").touch()
    (model(tmp_path / "project") / "src").mkdir()
    for name, message in {
        "file": r"is a file; --force only replaces a model's directory",
        "notes": r"holds files but no config\.json",
        "project": r"holds more than a model \(src\)",
    }.items():
        with pytest.raises(UsageError, match=message):
            check_destination(tmp_path / name, force=True)
    (tmp_path / "empty").mkdir()
    (model(tmp_path / "pulled") / ".cache").mkdir()
    for name in ("empty", "pulled", "new"):
        assert check_destination(tmp_path / name, force=True) == tmp_path / name


def test_the_directory_above_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing is not a directory; make it first"):
        check_destination(tmp_path / "missing" / "model", force=False)


def test_a_link_is_followed(tmp_path: Path) -> None:
    target = model(tmp_path / "target")
    (tmp_path / "link").symlink_to(target)
    write(tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (target / "config.json").read_text() == "after"
