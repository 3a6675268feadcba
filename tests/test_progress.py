"""A bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from lily.progress import SILENT, progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar("Converting") as progress:
        progress.begin(4_000_000, 8)
        progress.advance(1_000_000, 0)
        progress.advance(2_000_000, 3)
    return stream.getvalue()


def test_a_terminal_sees_bytes_and_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = work(Terminal(), monkeypatch)
    assert "Converting" in shown
    assert "3.0/4.0 MB" in shown
    assert "tensor 3/8" in shown


def test_a_file_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert work(io.StringIO(), monkeypatch) == ""
    with progress_bar("Converting") as progress:
        assert progress is SILENT
