"""Running ``lily`` as a user does, with standard output as a pipe or as a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from lily.cli import main
from lily.registry import Registry

__all__ = ["Result", "lily", "using"]

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as one JSON value, strict: no NaN and no Infinity."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)

    @property
    def lines(self) -> list[str]:
        """Standard output without colours and spaces at line ends."""
        return [line.rstrip() for line in ESCAPE.sub("", self.out).splitlines()]


def _neutral() -> dict[str, str]:
    """The environment without what decides about colour and terminals."""
    return {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")}


def lily(*args: str, columns: int | None = None, environ: dict[str, str] | None = None) -> Result:
    """Run a command in this process.

    Args:
        columns: standard output is a terminal of this width; a pipe if None.
    """
    out, err = (Terminal() if columns else io.StringIO()), io.StringIO()
    terminal = {"TERM": "xterm-256color", "COLUMNS": str(columns or 80)}
    with (
        patch.dict("os.environ", _neutral() | terminal | (environ or {}), clear=True),
        patch.object(sys, "argv", ["lily", *args]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Result(code, out.getvalue(), err.getvalue())


@contextmanager
def using(registry: Registry) -> Iterator[None]:
    """Let commands see this registry instead of what is installed."""
    with patch("lily.registry.default_registry", lambda: registry):
        yield
