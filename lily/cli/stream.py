"""Text as it comes: answers on standard output, progress on standard error, colour on terminals only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lily.reasoning import Piece

__all__ = ["Printer", "ProgressBar", "progress_bar"]

SHOW_AFTER = 256  # tokens: shorter prompts are read before a bar could be looked at


class Printer:
    """Writes pieces to standard output; thoughts only on a terminal, dimmed where colour is allowed."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._colour = self._terminal and "NO_COLOR" not in os.environ
        self._kind: str | None = None
        self._written = False

    def show(self, piece: Piece) -> None:
        """Write one piece at once."""
        if piece.kind == "reasoning" and not self._terminal:
            return
        if piece.kind != self._kind:
            self._turn(piece.kind)
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        self._written = True

    def close(self) -> None:
        """End the last line and the colour."""
        self._turn(None)
        if self._written:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _turn(self, kind: str | None) -> None:
        if self._kind == "reasoning":
            sys.stdout.write("\033[0m" if self._colour else "")
            if kind is not None:
                sys.stdout.write("\n\n")
        if kind == "reasoning" and self._colour:
            sys.stdout.write("\033[2m")
        self._kind = kind


class ProgressBar:
    """Prompt tokens read; called by the engine after every chunk."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task("Reading the prompt", total=None, visible=False)

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, visible=total >= SHOW_AFTER and done < total)

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def progress_bar() -> Iterator[ProgressBar]:
    """A bar on standard error if that is a terminal, else nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressBar(None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        shown = ProgressBar(bar)
        try:
            yield shown
        finally:
            shown.close()
