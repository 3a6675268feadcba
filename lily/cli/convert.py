"""``lily convert``: quantize a Hugging Face checkpoint to MLX 4-bit."""

from __future__ import annotations

from pathlib import Path

import click

from lily.cli.written import show, size

__all__ = ["command"]

EPILOG = """\b
Examples:
  lily convert ~/models/Qwen3.6-35B-A3B ~/models/Qwen3.6-35B-A3B-4bit
  lily convert ./my-model ./my-model-8bit --bits 8 --group-size 32 --json

\b
Keys of --json:
  path, bytes, tensors, parameters, bits_per_weight, shards, seconds,
  skipped (tensors left out, by reason: vision, mtp)
"""


@click.command("convert", epilog=EPILOG)
@click.argument("source")
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--bits", type=click.Choice(["4", "8"]), default="4", show_default=True, help="Of a weight's code.")
@click.option(
    "--group-size",
    type=click.Choice(["32", "64", "128"]),
    default="64",
    show_default=True,
    help="Weights that share a scale and a bias.",
)
@click.option(
    "--gate-bits",
    type=click.Choice(["4", "8"]),
    default="8",
    show_default=True,
    help="Of the router and the shared expert's gate.",
)
@click.option("--shard-size", type=size, default="5GB", show_default=True, help="Files are no larger than this.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Of scales, norms and the like. [default: the configuration's]",
)
@click.option("--force", is_flag=True, help="Replace DESTINATION if it is a model's directory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    source: str,
    destination: Path,
    bits: str,
    group_size: str,
    gate_bits: str,
    shard_size: int,
    dtype: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Quantize a checkpoint, to the very files that mlx_lm.convert writes.

    SOURCE is an unquantized model's directory, in Hugging Face's layout or MLX's. DESTINATION appears whole or not
    at all, also when interrupted. Memory stays at a few times the largest tensor.
    """
    from lily.convert import convert
    from lily.progress import progress_bar

    with progress_bar("Converting") as progress:
        written = convert(
            source,
            destination,
            bits=int(bits),
            group_size=int(group_size),
            gate_bits=int(gate_bits),
            shard_nbytes=shard_size,
            dtype=dtype,
            force=force,
            progress=progress,
        )
    show(written, as_json)
