"""The ``lily`` command: one module a subcommand."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from lily.errors import LilyError

__all__ = ["cli", "main"]

# Modules are imported only for the command that is run, so `lily --help` stays quick.
COMMANDS = {
    "run": ("run", "Write an answer, or chat."),
    "plan": ("plan", "Show the ops, variants and bytes of one step."),
    "policy": ("policy", "List, show, check, explain and compare policies."),
    "plugins": ("plugins", "List kernel plugins and check their kernels."),
    "convert": ("convert", "Quantize a Hugging Face checkpoint to MLX 4-bit."),
    "synth": ("synth", "Write random weights at a named shape."),
    "pull": ("pull", "Fetch a checkpoint from the Hugging Face hub."),
    "doctor": ("doctor", "Say what this machine can run, and why not."),
}


class Group(click.Group):
    """Finds subcommands by name without importing the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"lily.cli.{COMMANDS[cmd_name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.command(cls=Group, epilog='Example: lily run -p "Tell me a story about a fox."')
@click.version_option(package_name="lily", message="lily %(version)s")
def cli() -> None:
    """Local inference for Qwen3.6-35B-A3B, with kernels as plugins and the choice between them in a policy file."""


def main() -> None:
    """Entry point: LilyErrors become one line on stderr, exit codes 0, 1 (failed), 2 (usage), 130 (Ctrl-C)."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing is wrong, and nothing more can be written.
        sys.stderr.close()
        sys.exit(0)
    except LilyError as error:
        click.echo(f"lily: {error}", err=True)
        sys.exit(error.exit_code)
    sys.exit(0)
