"""``lily run``: write an answer, or chat."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from lily.errors import UsageError

if TYPE_CHECKING:
    from lily.generation import Generation, Result
    from lily.sampling import SamplingParams
    from lily.text_engine import TextEngine

__all__ = ["command"]

EPILOG = """\b
Examples:
  lily run -p "Tell me a story about a fox."
  lily run ~/models/Qwen3.6-35B-A3B-4bit --policy m5max.yaml
  lily run --json --temperature 0 -p "What is 7 plus 6?"
  cat notes.txt | lily run --system "Answer in one line."
"""


@dataclass(frozen=True)
class Request:
    """What the command line asked for, apart from the model."""

    system: str | None
    raw: bool
    think: bool | None
    params: SamplingParams
    max_tokens: int | None
    stops: tuple[str, ...]

    def generation(self, engine: TextEngine, text: str, **options: Any) -> Generation:
        """One answer to ``text`` in a fresh session."""
        options |= {"params": self.params, "max_tokens": self.max_tokens, "stops": self.stops}
        if self.raw or engine.template is None:
            if self.system is not None:
                raise UsageError("--system needs a chat template: leave out --raw, or use a model that has one")
            return engine.complete(text, **options)
        return engine.chat(self.messages(text), enable_thinking=self.think, **options)

    def messages(self, text: str) -> list[dict[str, str]]:
        """The conversation that ``text`` begins."""
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*start, {"role": "user", "content": text}]


def _sampling_options(function: Any) -> Any:
    for option in (
        click.option("--seed", type=int, help="Makes sampling give the same text every time."),
        click.option("--presence-penalty", type=float, help="Subtracted from tokens already written."),
        click.option("--repetition-penalty", type=float, help="Divides tokens already seen; 1 is off."),
        click.option("--min-p", type=float, help="Least probability relative to the best; 0 is off."),
        click.option("--top-p", type=float, help="Keep the likeliest tokens up to this probability; 1 is off."),
        click.option("--top-k", type=int, help="Keep this many of the likeliest tokens; 0 is off."),
        click.option("--temperature", type=float, help="0 is greedy. [default: the checkpoint's own]"),
    ):
        function = option(function)
    return function


@click.command("run", epilog=EPILOG)
@click.argument("model", required=False)
@click.option("-p", "--prompt", help="What to ask. Without it: standard input, or a chat on a terminal.")
@click.option("--policy", default="auto", show_default=True, help="A policy file or name.")
@click.option("--host", default="auto", show_default=True, help="Where to run: cpu, metal, or a plugin's.")
@click.option("--system", help="A system message.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--think/--no-think", default=None, help="Whether the model thinks first. [default: the template's]")
@click.option("--max-tokens", type=click.IntRange(1), help="Write at most this many. [default: to the context's end]")
@click.option("--max-context", type=click.IntRange(1), default=None, help="Tokens of context. [default: the model's]")
@click.option("--stop", "stops", multiple=True, help="End the answer before this text; may be repeated.")
@_sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def command(
    model: str | None,
    prompt: str | None,
    policy: str,
    host: str,
    system: str | None,
    raw: bool,
    think: bool | None,
    max_tokens: int | None,
    max_context: int | None,
    stops: tuple[str, ...],
    as_json: bool,
    **sampling: Any,
) -> None:
    """Write an answer to a prompt; on a terminal without a prompt, chat.

    MODEL is a checkpoint's directory; without one, the bundled demo model runs. The prompt is a user message
    for the checkpoint's chat template. The answer goes to standard output, everything else to standard error.
    """
    from lily.sampling import SamplingParams
    from lily.text_engine import load

    chatting = prompt is None and sys.stdin.isatty()
    if chatting and as_json:
        raise UsageError("--json needs a prompt: give -p TEXT or a file on standard input")
    if chatting and raw:
        raise UsageError("--raw needs a prompt: give -p TEXT or a file on standard input")
    SamplingParams(**{name: value for name, value in sampling.items() if value is not None})
    text = None if chatting else _prompt_text(prompt)
    if model is None and not as_json:
        click.echo(
            "No model given: running the bundled demo model (21.7M parameters, small stories and sums).", err=True
        )
    engine = load(model or "demo", policy=policy, host=host, max_context=max_context or 0)
    for reason, count in engine.skipped.items():
        if not as_json:
            click.echo(f"{engine.model.name}: {count} tensors left unused ({reason}).", err=True)
    params = SamplingParams.from_defaults(engine.defaults, **sampling)
    request = Request(system, raw, think, params, max_tokens, stops)
    if text is None:
        from lily.cli.chat import chat

        chat(engine, request)
    else:
        _answer(engine, request, text, as_json)


def _prompt_text(prompt: str | None) -> str:
    if prompt is None:
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 text (byte {error.start}); give a text file") from None
    if not prompt.strip():
        raise UsageError("the prompt is empty; give -p TEXT or a file on standard input")
    return prompt


def _answer(engine: TextEngine, request: Request, text: str, as_json: bool) -> None:
    from lily.cli.stream import Printer, progress_bar

    if as_json:
        generation = request.generation(engine, text)
        for _ in generation:
            pass  # everything ends up in the result
        click.echo(json.dumps(report(engine, generation.result), ensure_ascii=False))
        return
    with progress_bar() as progress:
        generation = request.generation(engine, text, progress=progress)
        printer = Printer()
        try:
            for piece in generation:
                progress.close()
                printer.show(piece)
        finally:
            printer.close()
    click.echo(figures(generation.result), err=True)


def report(engine: TextEngine, result: Result) -> dict[str, Any]:
    """The object of ``--json``; docs/cli.md describes its keys."""
    return {
        "text": result.text,
        "reasoning": result.reasoning,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "cached_tokens": result.cached_tokens,
        "ttft_s": round(result.ttft_s, 6),
        "prefill_tok_s": round(result.prefill_tok_s, 3),
        "decode_tok_s": round(result.decode_tok_s, 3),
        "peak_memory_bytes": peak_memory_bytes(),
        "model": engine.model.name,
        "host": engine.host.name,
        "policy": engine.policy.name,
    }


def figures(result: Result) -> str:
    """One line: tokens, rates, time to first token, peak memory."""
    cached = f" ({result.cached_tokens} cached)" if result.cached_tokens else ""
    reason = {"stop": "", "length": ", cut at the limit", "cancelled": ", stopped"}[result.finish_reason]
    return (
        f"{result.prompt_tokens} prompt tokens{cached} at {result.prefill_tok_s:.0f} tok/s, "
        f"{result.completion_tokens} output tokens at {result.decode_tok_s:.1f} tok/s{reason}; "
        f"first token after {result.ttft_s * 1000:.0f} ms, peak memory {peak_memory_bytes() / 1e6:.0f} MB"
    )


def peak_memory_bytes() -> int:
    """The most memory this process has held, mapped weights included as far as they were touched."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
