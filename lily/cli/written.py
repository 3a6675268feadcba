"""What commands that write a checkpoint have in common: sizes as people write them, and the result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from lily.cli.output import bytes_text, count, print_json, say, seconds_text

if TYPE_CHECKING:
    from lily.checkpoint_writer import Written

__all__ = ["say_skipped", "show", "size"]

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
REASONS = {"vision": "the vision tower", "mtp": "the multi-token-prediction head"}


def size(text: str) -> int:
    """An option's type: bytes, as ``5GB``, ``500 MB`` or ``2GiB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?I?)B?", text.strip().upper())
    nbytes = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if nbytes < 1:
        raise click.BadParameter(f"{text!r} is not a size; expected a number of bytes such as 5GB, 500MB or 2GiB")
    return nbytes


def show(written: Written, as_json: bool) -> None:
    """The result: one JSON object, or a line for people."""
    if as_json:
        print_json(
            {
                "path": str(written.path),
                "bytes": written.nbytes,
                "tensors": written.tensors,
                "parameters": written.parameters,
                "bits_per_weight": round(written.bits_per_weight, 4),
                "shards": written.shards,
                "seconds": round(written.seconds, 3),
                "skipped": dict(written.skipped),
            }
        )
        return
    say_skipped(written.skipped)
    say(
        f"{written.path}: {count(written.tensors, 'tensor')} in {count(written.shards, 'file')}, "
        f"{bytes_text(written.nbytes)}, {written.bits_per_weight:.3f} bits per weight, "
        f"{seconds_text(written.seconds)}"
    )


def say_skipped(skipped: Mapping[str, int]) -> None:
    """Which tensors of the source are not part of the text model, on standard error."""
    for reason, number in skipped.items():
        click.echo(f"Left out: {count(number, 'tensor')} of {REASONS[reason]}.", err=True)
