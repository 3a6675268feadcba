"""How far a long piece of work has come: a bar on standard error, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

__all__ = ["SILENT", "Progress", "progress_bar"]


class Progress(Protocol):
    """Told by the work itself, from the thread that does it."""

    def begin(self, nbytes: int, tensors: int) -> None:
        """The whole of the work, known before it starts."""

    def advance(self, nbytes: int, tensors: int) -> None:
        """So many more bytes, and tensors, are done."""


class _Silent:
    def begin(self, nbytes: int, tensors: int) -> None:
        pass

    def advance(self, nbytes: int, tensors: int) -> None:
        pass


SILENT: Progress = _Silent()


class _Bar:
    def __init__(self, bar: RichProgress, label: str) -> None:
        self._bar = bar
        self._task = bar.add_task(label, total=None, done=0, tensors="?")
        self._done = 0

    def begin(self, nbytes: int, tensors: int) -> None:
        self._bar.update(self._task, total=nbytes, tensors=tensors)

    def advance(self, nbytes: int, tensors: int) -> None:
        self._done += tensors
        self._bar.update(self._task, advance=nbytes, done=self._done)


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """Bytes, tensors, rate and time left; nothing at all where standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield SILENT
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("tensor {task.fields[done]}/{task.fields[tensors]}"),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, label)
