"""``lily synth``: write random weights at a named shape."""

from __future__ import annotations

from pathlib import Path

import click

from lily.cli.written import show, size

__all__ = ["command"]

EPILOG = """\b
Examples:
  lily synth qwen3.6-35b-a3b /tmp/four-layers --layers 4
  lily run /tmp/four-layers --raw -p "Once" --max-tokens 64
  lily synth demo ./twin --hf --seed 7

\b
Keys of --json:
  path, bytes, tensors, parameters, bits_per_weight, shards, seconds,
  skipped (always empty)
"""


@click.command("synth", epilog=EPILOG)
@click.argument("model", metavar="NAME")
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--layers", type=click.IntRange(1), help="Only so many of the first layers. [default: all]")
@click.option("--vocab", type=click.IntRange(1), help="Rows of the vocabulary. [default: the model's]")
@click.option("--shard-size", type=size, default="5GB", show_default=True, help="Files are no larger than this.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Other seeds, other weights.")
@click.option("--hf", "huggingface", is_flag=True, help="bfloat16 in Hugging Face's layout, instead of MLX 4-bit.")
@click.option("--force", is_flag=True, help="Replace DESTINATION if it is a model's directory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    destination: Path,
    layers: int | None,
    vocab: int | None,
    shard_size: int,
    seed: int,
    huggingface: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write a model of random weights, to measure speed and memory with.

    NAME is a built-in model (demo, qwen3.6-35b-a3b), or the path of a model whose shape to take. The text it
    writes means nothing, but its activations are of the usual size. A model without a tokenizer gets one of bytes.
    """
    from lily.progress import progress_bar
    from lily.synth import synth

    with progress_bar("Writing") as progress:
        written = synth(
            model,
            destination,
            layers=layers,
            vocab=vocab,
            shard_nbytes=shard_size,
            seed=seed,
            huggingface=huggingface,
            force=force,
            progress=progress,
        )
    show(written, as_json)
