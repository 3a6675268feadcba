"""The engine: one model on one host under one policy."""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lily.errors import ContextLengthError, UsageError
from lily.hosts.base import Buffer, Host, Prepared, Ticket
from lily.memory import KvPool, Slots, StateLayout
from lily.model import StepShape, emit_step, require_supported
from lily.policy import Policy
from lily.recorder import Recorder
from lily.registry import Registry
from lily.sampling import SamplingParams
from lily.session import Session
from lily.step import PAGE_TOKENS, RING
from lily.weights import ModelWeights

__all__ = ["Engine", "Logits", "record_step"]

Logits = np.ndarray[Any, np.dtype[np.float32]]
Progress = Callable[[int, int], None]
PLANS_KEPT = 12


def record_step(
    weights: ModelWeights,
    host: Host,
    policy: Policy,
    registry: Registry,
    shape: StepShape,
    pool: KvPool,
    max_context: int,
) -> Recorder:
    """Record the plan of one step, as the engine would run it or ``lily plan`` count it."""
    slots = Slots(len(weights.sources) or 1)
    recorder = Recorder(
        slots,
        lambda op: policy.choose(op, host.kind, registry),
        host.activation_dtype,
        serial=policy.execution.encoder == "serial",
    )
    layout = StateLayout(weights.config, host.activation_dtype)
    emit_step(recorder, weights, pool, layout, shape, -(-max_context // PAGE_TOKENS))
    return recorder


@dataclass
class _Recorded:
    prepared: Prepared
    scratch: dict[str, int]


class Engine:
    """Runs a model's steps, session by session, in the order they are asked for.

    Args:
        weights: bound, not copied, where the host can.
        max_context: tokens a session can hold; 0 takes the model's own limit.
        cache_tokens: tokens that all sessions and snapshots together can hold; 0 takes four contexts.
        mask: bool ``[vocab]``, False for rows that no token has; they are never sampled.
    """

    def __init__(
        self,
        weights: ModelWeights,
        host: Host,
        policy: Policy,
        registry: Registry,
        *,
        max_context: int = 0,
        cache_tokens: int = 0,
        mask: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
    ) -> None:
        require_supported(weights.config)
        self.weights = weights
        self.config = weights.config
        self.host = host
        self.policy = policy
        self.registry = registry
        self.max_context = max_context or self.config.max_position_embeddings
        self.pool = KvPool(host, self.config, cache_tokens or 4 * self.max_context, policy.execution.kv_dtype)
        self._layout = StateLayout(self.config, host.activation_dtype)
        self._slots = Slots(len(weights.sources))
        self._weights = [host.bind(source, f"weights {i}") for i, source in enumerate(weights.sources)]
        self._mask = host.allocate(self.config.vocab_size, "vocabulary mask")
        allowed = np.ones(self.config.vocab_size, np.bool_) if mask is None else mask
        host.write(self._mask, 0, allowed.astype(np.uint8))
        self._scratch: dict[str, Buffer] = {}
        self._plans: OrderedDict[StepShape, _Recorded] = OrderedDict()
        self._edges = policy.breakpoints("context")

    # -- sessions ------------------------------------------------------------------------------------------------

    def session(self, max_context: int = 0) -> Session:
        """A new empty session.

        Args:
            max_context: tokens it can hold, at most the engine's; 0 takes the engine's.
        """
        limit = min(max_context or self.max_context, self.max_context)
        chunk = self.policy.execution.prefill_chunk
        pages = -(-self.max_context // PAGE_TOKENS)
        return Session(self.host, self.pool, self._layout, limit, pages, chunk, self.config.vocab_size)

    def prefill(
        self,
        session: Session,
        tokens: Sequence[int],
        *,
        outputs: Literal["last", "all"] = "last",
        progress: Progress | None = None,
    ) -> Logits:
        """Read ``tokens`` into the session, chunk by chunk.

        Args:
            outputs: logits of the ``last`` position, or of ``all``.
            progress: called with tokens done and tokens in all, after every chunk.

        Returns:
            float32 ``[vocab]``, or ``[len(tokens), vocab]`` for ``all``.

        Raises:
            ContextLengthError: they don't fit; the session is as before.
            UsageError: an id is outside the vocabulary, or there is none.
        """
        kept: list[Logits] = []

        def collect(rows: int, last: bool) -> None:
            if outputs == "all" or last:
                kept.append(self._read_logits(rows if outputs == "all" else 1))

        self._prefill(session, tokens, outputs, progress, collect)
        result: Logits = np.concatenate(kept) if outputs == "all" else kept[-1][0]
        return result

    def read(self, session: Session, tokens: Sequence[int], progress: Progress | None = None) -> None:
        """Like :meth:`prefill`, without computing logits."""
        self._prefill(session, tokens, "none", progress, None)

    def decode(self, session: Session, token: int) -> Logits:
        """Read one token and give the logits after it, float32 ``[vocab]``."""
        self.check_fits(session, [token])
        session.reserve(1)
        session.write_step("position", len(session.tokens))
        session.write_step("token", token)
        self._run(session, StepShape("decode", 1, self._bucket(len(session.tokens) + 1), "last"))
        session.tokens.append(token)
        result: Logits = self._read_logits(1)[0]
        return result

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Logits after every token of a fresh session, float32 ``[len(tokens), vocab]``."""
        session = self.session()
        try:
            return self.prefill(session, tokens, outputs="all")
        finally:
            session.close()

    # -- generation ----------------------------------------------------------------------------------------------

    def generate(
        self,
        session: Session,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> Iterator[int]:
        """Read ``prompt`` into the session, then sample tokens, each read in turn before the next.

        With ``token_handoff: device`` up to ``in_flight`` steps are queued and a token reaches the next step without
        passing the CPU. However the iteration ends, ``session.tokens`` afterwards says exactly what was read: the
        last sampled token may be in it or not.

        Args:
            max_tokens: sample at most this many; None goes on to the end of the context.
            stop_ids: ids that end the generation; the last id given is one of them if it did.

        Raises:
            ContextLengthError, UsageError: as :meth:`prefill`.
        """
        params = params or SamplingParams()
        room = session.max_context - len(session.tokens) - len(prompt) + 1
        budget = room if max_tokens is None else min(max_tokens, room)
        self.check_fits(session, prompt)
        if budget < 1:
            self._prefill(session, prompt, "none", progress, None)
            return
        seed = secrets.randbits(64) if params.seed is None else params.seed
        session.begin_sampling(params, seed, prompt)
        self._prefill(session, prompt, "sample", progress, None)
        yield from self._sample(session, budget, frozenset(stop_ids))

    def _sample(self, session: Session, budget: int, stop_ids: frozenset[int]) -> Iterator[int]:
        on_device = self.policy.execution.token_handoff == "device"
        ahead = min(self.policy.execution.in_flight, RING - 1) if on_device else 1
        start = len(session.tokens)
        flying: deque[Ticket] = deque()
        sampled = submitted = 1  # the prefill sampled the first token
        try:
            while True:
                token = int(session.read_step("ring")[(sampled - 1) % RING])
                # Steps beyond this token are queued before the caller sees it, unless it is the last one.
                last = token in stop_ids or sampled >= budget
                while not last and submitted < budget and len(flying) < ahead:
                    if not on_device:
                        session.write_step("token", token)
                        session.write_step("position", start + submitted - 1)
                    flying.append(self._submit_sampling_step(session, start + submitted - 1))
                    submitted += 1
                yield token
                if last:
                    return
                flying.popleft().wait(interruptible=False)
                session.tokens.append(token)
                sampled += 1
        finally:
            for ticket in flying:
                ticket.wait(interruptible=False)
            # Steps that were queued ahead have read tokens nobody took: the device knows how far it came.
            ring, end = session.read_step("ring"), int(session.read_step("position"))
            session.tokens.extend(int(ring[i % RING]) for i in range(len(session.tokens) - start, end - start))

    def _submit_sampling_step(self, session: Session, position: int) -> Ticket:
        session.reserve(position + 1 - len(session.tokens))
        return self._submit(session, StepShape("decode", 1, self._bucket(position + 1), "sample"))

    # -- steps ---------------------------------------------------------------------------------------------------

    def check_fits(self, session: Session, tokens: Sequence[int]) -> None:
        """Raise what :meth:`prefill` would for ``tokens`` after what the session holds."""
        if not tokens:
            raise UsageError("there is no token to read: the prompt is empty")
        for token in tokens:
            if not 0 <= token < self.config.vocab_size:
                raise UsageError(f"token id {token} is outside the vocabulary of {self.config.vocab_size}")
        if len(session.tokens) + len(tokens) > session.max_context:
            raise ContextLengthError(len(session.tokens) + len(tokens), session.max_context)

    def _prefill(
        self,
        session: Session,
        tokens: Sequence[int],
        outputs: Literal["none", "last", "all", "sample"],
        progress: Progress | None,
        collect: Callable[[int, bool], None] | None,
    ) -> None:
        self.check_fits(session, tokens)
        chunk = self.policy.execution.prefill_chunk
        session.write_step("position", len(session.tokens))
        for first in range(0, len(tokens), chunk):
            rows = list(tokens[first : first + chunk])
            last = first + len(rows) == len(tokens)
            session.reserve(len(rows))
            session.write_step("position", len(session.tokens))
            self.host.write(session.buffer("tokens"), 0, np.array(rows, np.int32))
            context = self._bucket(len(session.tokens) + len(rows))
            shape = StepShape("prefill", len(rows), context, outputs if last or outputs == "all" else "none")
            self._run(session, shape)
            session.tokens.extend(rows)
            if collect is not None:
                collect(len(rows), last)
            if progress is not None:
                progress(first + len(rows), len(tokens))

    def _run(self, session: Session, shape: StepShape) -> None:
        try:
            self._submit(session, shape).wait()
        except BaseException:
            session.invalidate()
            raise

    def _submit(self, session: Session, shape: StepShape) -> Ticket:
        recorded = self._plan(shape)
        scratch = [self._scratch[name] for name in ("activations", "temporaries", "logits")]
        owned = [session.buffer(name) for name in ("state", "step", "pages", "tokens", "counts")]
        return self.host.submit(recorded.prepared, [*self._weights, *scratch, self._mask, self.pool.buffer, *owned])

    def _plan(self, shape: StepShape) -> _Recorded:
        recorded = self._plans.get(shape)
        if recorded is None:
            recorder = record_step(
                self.weights, self.host, self.policy, self.registry, shape, self.pool, self.max_context
            )
            rows = {"all": shape.rows, "last": 1, "sample": 1, "none": 0}[shape.outputs]
            recorded = _Recorded(
                self.host.prepare(recorder.plan),
                {
                    "activations": recorder.activation_bytes,
                    "temporaries": recorder.temporary_bytes,
                    "logits": rows * self.config.vocab_size * 4,
                },
            )
            self._plans[shape] = recorded
            while len(self._plans) > PLANS_KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(shape)
        for name, nbytes in recorded.scratch.items():
            self._grow(name, nbytes)
        return recorded

    def _grow(self, name: str, nbytes: int) -> None:
        """Scratch has no content between steps, so a larger plan gets a new buffer; one in use outlives its run."""
        old = self._scratch.get(name)
        if old is not None and old.nbytes >= nbytes:
            return
        if old is not None:
            self.host.release(old)
        self._scratch[name] = self.host.allocate(max(nbytes, 64), name)

    def _bucket(self, context: int) -> int:
        """The smallest context at which the policy gives the same answers."""
        return max((edge for edge in self._edges if edge <= context), default=1)

    def _read_logits(self, rows: int) -> Logits:
        vocab = self.config.vocab_size
        values: Logits = self.host.read(self._scratch["logits"], 0, "<f4", rows * vocab)
        return values.reshape(rows, vocab)

    def close(self) -> None:
        """Free the engine's memory; its sessions must be closed first."""
        self.host.close()
        for buffer in [*self._scratch.values(), self._mask, self.pool.buffer]:
            self.host.release(buffer)
        self._scratch = {}
        self._plans.clear()
