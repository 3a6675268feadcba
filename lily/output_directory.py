"""A directory that appears whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lily.errors import LilyError, UsageError

__all__ = ["OutputError", "check_destination", "output_directory"]

AT_FDCWD = {"linux": -100, "darwin": -2}
# RENAME_EXCHANGE of Linux and RENAME_SWAP of macOS have one value.
EXCHANGE = 2


class OutputError(LilyError):
    """A directory can't be written: no room, no permission, a failing disk."""


def check_destination(destination: Path, *, force: bool) -> Path:
    """The directory that will be written, links resolved.

    Args:
        force: it may replace a model's directory, or an empty one.

    Raises:
        UsageError: something is there that must not be replaced, or the directory above is missing.
    """
    destination = destination.expanduser().resolve()
    if not destination.parent.is_dir():
        raise UsageError(f"{destination.parent} is not a directory; make it first")
    if not destination.exists():
        return destination
    if not force:
        raise UsageError(f"{destination} exists already; give another name, or --force to replace it")
    if not destination.is_dir():
        raise UsageError(f"{destination} is a file; --force only replaces a model's directory")
    entries = list(destination.iterdir())
    # Downloads from the hub keep their state in .cache.
    strangers = sorted(entry.name for entry in entries if not entry.is_file() and entry.name != ".cache")
    if strangers:
        raise UsageError(f"{destination} holds more than a model ({strangers[0]}); --force doesn't replace it")
    if entries and not (destination / "config.json").is_file():
        raise UsageError(f"{destination} holds files but no config.json; --force only replaces a model's directory")
    return destination


@contextmanager
def output_directory(destination: Path, *, nbytes: int, force: bool = False) -> Iterator[Path]:
    """A new directory to write into, beside ``destination``, that takes its place when the block ends well.

    All files are flushed to the disk before that. If the block raises, is interrupted or terminated, the new
    directory is removed and ``destination`` is as it was. A directory that is replaced is exchanged in one step
    where the system has one; elsewhere it is renamed away first and back again if that fails.

    Args:
        nbytes: how much will be written.
        force: as in :func:`check_destination`.

    Raises:
        UsageError: as in :func:`check_destination`.
        OutputError: there isn't room for ``nbytes``, or writing failed.
    """
    try:
        destination = check_destination(destination, force=force)
        temporary = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.partial")
        free = shutil.disk_usage(destination.parent).free
        if free < nbytes:
            raise OutputError(
                f"{destination} will take {_gigabytes(nbytes)}, but only {_gigabytes(free)} are free on that disk"
            )
        temporary.mkdir()
        with _terminated():
            try:
                yield temporary
                _flush(temporary)
                _put_in_place(temporary, destination)
            finally:
                # What was replaced, or what was not finished.
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"can't write {destination}: {reason}; nothing of it is left") from error


def _flush(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(temporary: Path, destination: Path) -> None:
    """Rename; ``temporary`` then is what was there before, or no more."""
    if not destination.exists():
        os.rename(temporary, destination)
    elif not _exchange(temporary, destination):
        before = temporary.with_suffix(".before")
        os.rename(destination, before)
        try:
            os.rename(temporary, destination)
        except BaseException:
            os.rename(before, destination)
            raise
        os.rename(before, temporary)
    descriptor = os.open(destination.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system has no such step."""
    libc = ctypes.CDLL(None, use_errno=True)
    rename: Callable[..., int] | None = getattr(libc, "renameatx_np" if sys.platform == "darwin" else "renameat2", None)
    if rename is None or sys.platform not in AT_FDCWD:
        return False
    here = AT_FDCWD[sys.platform]
    if rename(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


@contextmanager
def _terminated() -> Iterator[None]:
    """Within, a polite kill raises SystemExit as Ctrl-C raises KeyboardInterrupt, so that clean-up runs."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
