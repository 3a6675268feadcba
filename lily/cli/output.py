"""What commands print: tables and lines, laid out and coloured on a terminal, plain and aligned elsewhere; and JSON.

Colour follows Rich's rules: none where ``NO_COLOR`` is set or ``TERM`` is dumb, ``COLUMNS`` overrides the width.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import click
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = [
    "Column",
    "bytes_text",
    "console",
    "count",
    "heading",
    "print_json",
    "rate_text",
    "say",
    "seconds_text",
    "show_table",
]

Cell: TypeAlias = str | Text
GAP = 2  # spaces between the columns of plain text


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        right: numbers are aligned on the right.
        fold: may be cut into lines where a terminal is narrow; the other columns keep their width.
        style: Rich's, for terminals.
    """

    title: str
    right: bool = False
    fold: bool = False
    style: str = ""


def console() -> Console:
    """Standard output as it is now; ``is_terminal`` and ``width`` say how to lay things out."""
    return Console(highlight=False, markup=False, emoji=False)


def say(text: Cell = "", *, indent: int = 0) -> None:
    """One paragraph: wrapped at words on a terminal, one line elsewhere."""
    out = console()
    if out.is_terminal:
        out.print(Padding(text, (0, 0, 0, indent), expand=False) if indent else text)
    else:
        click.echo(" " * indent + _plain(text))


def heading(text: str) -> None:
    """The title of a section, after an empty line."""
    say()
    say(Text(text, style="bold"))


def show_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, total: Sequence[Cell] | None = None
) -> None:
    """A table with a line of titles.

    Args:
        rows: cells, as many as columns. Elsewhere than on a terminal a row is always one line.
        total: a last row, set apart on a terminal.
    """
    out = console()
    if out.is_terminal:
        out.print(_rich_table(columns, rows, total))
        return
    titles: list[Sequence[Cell]] = [[column.title for column in columns]]
    lines = [[_plain(cell) for cell in row] for row in [*titles, *rows, *([total] if total is not None else [])]]
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = [_aligned(*part) for part in zip(line, widths, columns, strict=True)]
        click.echo((" " * GAP).join(cells).rstrip())


def _rich_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], total: Sequence[Cell] | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            style=column.style,
            overflow="fold",
            no_wrap=not column.fold,
        )
    for row in rows:
        table.add_row(*map(_rich, row))
    if total is not None:
        table.add_section()
        table.add_row(*map(_rich, total), style="bold")
    return table


def _aligned(text: str, width: int, column: Column) -> str:
    space = " " * (width - cell_len(text))
    return space + text if column.right else text + space


def _plain(cell: Cell) -> str:
    text = cell.plain if isinstance(cell, Text) else cell
    return " ".join(text.split("\n"))


def _rich(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def print_json(value: Any) -> None:
    """One JSON value, indented, on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


def bytes_text(nbytes: int | float) -> str:
    """Bytes in units of 1,000, with three digits: ``0``, ``812 B``, ``20.5 kB``, ``1.67 GB``."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B" if nbytes else "0"
    return _scaled(float(nbytes), ("B", "kB", "MB", "GB", "TB", "PB"), 1000.0)


def seconds_text(seconds: float) -> str:
    """A duration with three digits: ``2.93 ms``, ``1.20 s``."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return _scaled(seconds * 1e9, ("ns", "µs", "ms", "s"), 1000.0)


def rate_text(per_second: float) -> str:
    """Tokens a second: ``340 tok/s``, ``4.31 tok/s``."""
    return f"{per_second:,.0f} tok/s" if per_second >= 100 else f"{per_second:.3g} tok/s"


def count(number: int, noun: str) -> str:
    """``1 rule``, ``1,200 rules``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _scaled(value: float, units: Sequence[str], step: float) -> str:
    for unit in units:
        # 999.5 and more would be written 1000, or 1e+03.
        if value < step - 0.5 or unit == units[-1]:
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
        value /= step
    raise AssertionError("the last unit takes every value")
