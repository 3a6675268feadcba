"""From a prompt to text: one answer, streamed in pieces, with its figures."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lily.detokenize import Detokenizer
from lily.errors import ContextLengthError
from lily.reasoning import Piece, ReasoningSplitter
from lily.stops import StopMatcher

if TYPE_CHECKING:
    from lily.engine import Engine, Progress
    from lily.sampling import SamplingParams
    from lily.session import Session
    from lily.tokenizer import Tokenizer

__all__ = ["FinishReason", "Generation", "Prompt", "Result"]

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens.

    Attributes:
        history: the part that the next request of the conversation will begin with too; a snapshot is taken after it.
        header: the rest, such as the header of the assistant's turn.
        thinking: None if output is not to be split; else whether it begins inside a think block.
    """

    history: Sequence[int]
    header: Sequence[int] = ()
    thinking: bool | None = None

    @property
    def tokens(self) -> list[int]:
        return [*self.history, *self.header]


@dataclass
class Result:
    """What a generation came to; complete once the iteration is over.

    Attributes:
        text: the answer, without its thoughts.
        reasoning: the thoughts.
        token_ids: every token sampled, the one that ended the answer included.
        finish_reason: ``stop`` (an end-of-sequence id or a stop string), ``length`` (max_tokens or the end of the
            context), or ``cancelled``.
        prompt_tokens: tokens of the prompt; ``cached_tokens`` of them were still in the session.
        ttft_s: seconds from the start to the first token.
        decode_s: seconds from the first token to the last.
    """

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "cancelled"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def prefill_tok_s(self) -> float:
        """Tokens of the prompt read a second, those in the session not counted."""
        return (self.prompt_tokens - self.cached_tokens) / self.ttft_s if self.ttft_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first; 0 if there was only one."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s else 0.0


class Generation:
    """Iterate over it for the pieces of the answer; :attr:`result` has the rest.

    The session is moved to the longest position it knows that the prompt begins with, so a conversation that goes on
    reads only what is new. Closing the iteration early leaves the session consistent.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        session: Session,
        prompt: Prompt,
        params: SamplingParams,
        *,
        max_tokens: int | None = None,
        stop_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        self.result = Result(prompt_tokens=len(prompt.tokens))
        self._engine = engine
        self._session = session
        self._prompt = prompt
        self._params = params
        self._max_tokens = max_tokens
        self._stop_ids = frozenset(stop_ids)
        self._progress = progress
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._splitter = None if prompt.thinking is None else ReasoningSplitter(prompt.thinking)

    def __iter__(self) -> Iterator[Piece]:
        started = time.perf_counter()
        tokens = self._generate()
        first = last = None
        result = self.result
        try:
            for token in tokens:
                last = time.perf_counter()
                if first is None:
                    first = last
                    result.ttft_s = first - started
                result.decode_s = last - first
                result.token_ids.append(token)
                if token in self._stop_ids:
                    break
                text, stopped = self._stops.push(self._detokenizer.push(token))
                yield from self._pieces(text)
                if stopped:
                    break
            else:
                result.finish_reason = "length"
                yield from self._finish()
                return
            result.finish_reason = "stop"
            yield from self._finish()
        finally:
            tokens.close()

    def _generate(self) -> Generator[int, None, None]:
        history, header = list(self._prompt.history), list(self._prompt.header)
        session, engine = self._session, self._engine
        if len(history) + len(header) > session.max_context:
            raise ContextLengthError(len(history) + len(header), session.max_context)
        cached = self.result.cached_tokens = session.reuse(history + header)
        if header and cached < len(history):
            engine.read(session, history[cached:], self._progress)
            cached = len(history)
        if header and cached == len(history):
            session.remember()
        rest = (history + header)[cached:]
        yield from engine.generate(
            session,
            rest,
            self._params,
            max_tokens=self._max_tokens,
            stop_ids=tuple(self._stop_ids),
            progress=None if header else self._progress,
        )

    def _finish(self) -> Iterator[Piece]:
        if not self._stops.stopped:
            text, _ = self._stops.push(self._detokenizer.finish())
            yield from self._pieces(text + self._stops.finish())
        if self._splitter is not None:
            yield from self._kept(self._splitter.finish())

    def _pieces(self, text: str) -> Iterator[Piece]:
        if not text:
            return
        yield from self._kept([Piece("content", text)] if self._splitter is None else self._splitter.push(text))

    def _kept(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.kind == "reasoning":
                self.result.reasoning += piece.text
            else:
                self.result.text += piece.text
            yield piece
