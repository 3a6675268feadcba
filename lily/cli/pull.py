"""``lily pull``: fetch a checkpoint from the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lily.cli.output import bytes_text, count, print_json, say, seconds_text
from lily.cli.written import say_skipped

__all__ = ["command"]

EPILOG = """\b
Examples:
  lily pull mlx-community/Qwen3.6-35B-A3B-4bit
  lily pull Qwen/Qwen3.6-35B-A3B ~/models/qwen --revision main

\b
Keys of --json:
  path, bytes, tensors, seconds,
  skipped (tensors that Lily leaves unused, by reason: vision, mtp)
"""


@click.command("pull", epilog=EPILOG)
@click.argument("repository", metavar="REPO")
@click.argument("destination", required=False, type=click.Path(path_type=Path))
@click.option("--revision", help="A branch, tag or commit. [default: the main branch]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(repository: str, destination: Path | None, revision: str | None, as_json: bool) -> None:
    """Fetch a checkpoint's weights, configuration and tokenizer, and check them.

    REPO is OWNER/NAME on the hub. Without DESTINATION the files go to the hub library's cache, which other programs
    share. An interrupted pull goes on where it was. Needs an extra: pip install 'lily[hub]'.
    """
    from lily.pull import pull

    pulled = pull(repository, destination, revision=revision, show_progress=sys.stderr.isatty())
    if as_json:
        print_json(
            {
                "path": str(pulled.path),
                "bytes": pulled.nbytes,
                "tensors": pulled.tensors,
                "seconds": round(pulled.seconds, 3),
                "skipped": dict(pulled.skipped),
            }
        )
        return
    say_skipped(pulled.skipped)
    say(
        f"{pulled.path}: {count(pulled.tensors, 'tensor')}, {bytes_text(pulled.nbytes)}, {seconds_text(pulled.seconds)}"
    )
