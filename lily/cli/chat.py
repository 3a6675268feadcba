"""The chat of ``lily run`` on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from lily.cli.stream import Printer, progress_bar
from lily.errors import LilyError

if TYPE_CHECKING:
    from lily.cli.run import Request
    from lily.session import Session
    from lily.text_engine import TextEngine

__all__ = ["chat"]

HELP = "/new starts over, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."


def chat(engine: TextEngine, request: Request) -> None:
    """Talk until the user leaves; the session is reused from turn to turn."""
    click.echo(f"{engine.model.name} on {engine.host.description}, policy {engine.policy.name}. {HELP}", err=True)
    prompt: PromptSession[str] = PromptSession(history=_history())
    session = engine.session()
    messages = request.messages("")[:-1]
    while True:
        try:
            text = prompt.prompt("› ").strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            break
        if text in ("/quit", "/exit"):
            break
        if text == "/new":
            messages = request.messages("")[:-1]
            continue
        if text.startswith("/"):
            click.echo(HELP, err=True)
        elif text:
            turn = [*messages, {"role": "user", "content": text}]
            answer = _turn(engine, request, session, turn)
            if answer is not None:
                messages = [*turn, answer]
    session.close()


def _turn(
    engine: TextEngine, request: Request, session: Session, messages: list[dict[str, str]]
) -> dict[str, str] | None:
    """One answer, as far as it came if it was stopped; None if there is nothing to go on from."""
    from lily.cli.run import figures

    printer = Printer()
    try:
        with progress_bar() as progress:
            options: dict[str, Any] = {"session": session, "progress": progress}
            generation = engine.chat(
                messages,
                params=request.params,
                max_tokens=request.max_tokens,
                stops=request.stops,
                enable_thinking=request.think,
                **options,
            )
            pieces = iter(generation)
            try:
                for piece in pieces:
                    progress.close()
                    printer.show(piece)
            except KeyboardInterrupt:
                pass  # what was written so far is the answer
            finally:
                pieces.close()  # type: ignore[attr-defined]
                printer.close()
    except LilyError as error:
        click.echo(f"lily: {error}", err=True)
        return None
    click.echo(figures(generation.result), err=True)
    result = generation.result
    if not result.token_ids:
        return None
    return {"role": "assistant", "content": result.text, "reasoning_content": result.reasoning}


def _history() -> History:
    """What was typed before, kept in the user's own folder if that can be written."""
    path = Path.home() / ".local" / "state" / "lily" / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
