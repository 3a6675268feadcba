"""A session: one conversation's tokens, KV pages, recurrent and convolution state, and snapshots of them.

Keys and values can be reused up to any token, the recurrent state only at the very position it was left at
(model_spec §6), so going back means restoring a snapshot. A snapshot copies the state and shares the KV pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.errors import HostError
from lily.hosts.base import Buffer, Host
from lily.memory import KvPool, StateLayout
from lily.step import PAGE_TOKENS, STEP_DTYPE

if TYPE_CHECKING:
    from lily.sampling import SamplingParams

__all__ = ["Session", "Snapshot"]

SNAPSHOTS_KEPT = 8


@dataclass
class Snapshot:
    """A session's past at one position; closed by the session that made it or by :meth:`Session.forget`."""

    tokens: tuple[int, ...]
    state: Buffer
    pages: list[int]


class Session:
    """Made by :meth:`lily.engine.Engine.session`.

    Attributes:
        tokens: what the model has read, in order; its length is the position of the next token.
        max_context: tokens the session can hold.
        snapshots: kept for :meth:`reuse`, oldest first.
    """

    def __init__(
        self, host: Host, pool: KvPool, layout: StateLayout, max_context: int, max_pages: int, chunk: int, vocab: int
    ) -> None:
        self.max_context = max_context
        self.tokens: list[int] = []
        self.snapshots: list[Snapshot] = []
        self._host = host
        self._pool = pool
        self._pages: list[int] = []
        self._valid = True
        self._counted = False
        self._vocab = vocab
        self._buffers = {
            "state": host.allocate(layout.nbytes, "session state"),
            "step": host.allocate(STEP_DTYPE.itemsize, "step parameters"),
            "pages": host.allocate(4 * max_pages, "page table"),
            "tokens": host.allocate(4 * chunk, "prompt chunk"),
            "counts": host.allocate(8 * vocab, "token counts"),
        }

    def buffer(self, name: str) -> Buffer:
        """The session's buffer for slot ``name``; raises HostError once the session is closed."""
        if name not in self._buffers:
            raise HostError("the session is closed")
        return self._buffers[name]

    @property
    def valid(self) -> bool:
        """False after a step failed half-way: the session can only be rewound or closed."""
        return self._valid

    def invalidate(self) -> None:
        """Mark the state as unknown."""
        self._valid = False

    # -- room and parameters -------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more: own the page being filled, and take the ones after it.

        Raises:
            HostError: the session was left invalid, or the pool is full.
        """
        if not self._valid:
            raise HostError("a step of this session failed half-way; rewind it to a snapshot or start a new one")
        first, last = len(self.tokens) // PAGE_TOKENS, (len(self.tokens) + tokens - 1) // PAGE_TOKENS
        for index in range(first, last + 1):
            if index < len(self._pages):
                page = self._pool.own(self._pages[index])
                if page == self._pages[index]:
                    continue
                self._pages[index] = page
            else:
                page = self._pool.take()
                self._pages.append(page)
            self._host.write(self.buffer("pages"), 4 * index, np.array([page], np.int32))

    def write_step(self, field: str, value: float | int) -> None:
        """Set one step parameter."""
        dtype, offset = STEP_DTYPE.fields[field][:2]  # type: ignore[index]
        self._host.write(self.buffer("step"), offset, np.array([value], dtype))

    def read_step(self, field: str) -> Any:
        """Read one step parameter: a number, or the ring's array."""
        dtype, offset = STEP_DTYPE.fields[field][:2]  # type: ignore[index]
        base, shape = dtype.subdtype or (dtype, ())
        values = self._host.read(self.buffer("step"), offset, base.str, shape[0] if shape else 1)
        return values if shape else values[0]

    def begin_sampling(self, params: SamplingParams, seed: int, prompt: Sequence[int]) -> None:
        """Set the sampler's parameters, and its counts where a penalty asks for them."""
        step: np.ndarray[Any, Any] = np.zeros((), STEP_DTYPE)
        step["position"] = len(self.tokens)
        for name in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            step[name] = getattr(params, name)
        step["temperature"] = 0.0 if params.greedy else params.temperature
        step["seed_low"], step["seed_high"] = seed & 0xFFFFFFFF, seed >> 32
        self._host.write(self.buffer("step"), 0, step.reshape(1))
        penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        if penalised or self._counted:
            counts = np.zeros((2, self._vocab), np.int32)
            if penalised:
                counts[0] = np.bincount(np.array([*self.tokens, *prompt], np.int64), minlength=self._vocab)
            self._host.write(self.buffer("counts"), 0, counts)
        self._counted = penalised

    # -- the past ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Copy the state at this position; end it with :meth:`forget`, or keep it with :meth:`remember`."""
        if not self._valid:
            raise HostError("a step of this session failed half-way; there is nothing to take a snapshot of")
        state = self._host.allocate(self.buffer("state").nbytes, "snapshot")
        self._host.copy(self.buffer("state"), 0, state, 0, state.nbytes)
        used = -(-len(self.tokens) // PAGE_TOKENS)
        return Snapshot(tuple(self.tokens), state, self._pool.share(self._pages[:used]))

    def remember(self, snapshot: Snapshot | None = None) -> None:
        """Keep a snapshot (of now, if none is given) for :meth:`reuse`; the oldest goes when there are too many."""
        snapshot = snapshot or self.snapshot()
        for known in [known for known in self.snapshots if known.tokens == snapshot.tokens]:
            self.evict(known)
        self.snapshots.append(snapshot)
        while len(self.snapshots) > SNAPSHOTS_KEPT:
            self.evict(self.snapshots[0])

    def evict(self, snapshot: Snapshot) -> None:
        """Drop a remembered snapshot."""
        self.snapshots.remove(snapshot)
        self.forget(snapshot)

    def forget(self, snapshot: Snapshot) -> None:
        """Free a snapshot's memory and its share of the pages."""
        self._pool.drop(snapshot.pages)
        snapshot.pages = []
        self._host.release(snapshot.state)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back (or over) to a snapshot, which stays usable; it may be another session's of the same engine."""
        pages = self._pool.share(snapshot.pages)
        self._pool.drop(self._pages)
        self._pages = pages
        self._host.copy(snapshot.state, 0, self.buffer("state"), 0, snapshot.state.nbytes)
        self._host.write(self.buffer("pages"), 0, np.array(pages, np.int32))
        self.tokens = list(snapshot.tokens)
        self._valid = True

    def reset(self) -> None:
        """Back to the empty session; snapshots stay."""
        self._pool.drop(self._pages)
        self._pages = []
        self.tokens = []
        buffer = self.buffer("state")
        self._host.write(buffer, 0, np.zeros(buffer.nbytes, np.uint8))
        self._valid = True

    def reuse(self, tokens: Sequence[int]) -> int:
        """Move to the longest known position that is a true prefix of ``tokens`` and leaves one token to run.

        Returns:
            tokens reused: ``tokens[n:]`` remain to be prefilled.
        """
        wanted = tuple(tokens)

        def fits(past: Sequence[int]) -> bool:
            return len(past) < len(wanted) and tuple(past) == wanted[: len(past)]

        best = max((s for s in self.snapshots if fits(s.tokens)), key=lambda s: len(s.tokens), default=None)
        if self._valid and fits(self.tokens) and (best is None or len(best.tokens) <= len(self.tokens)):
            return len(self.tokens)
        if best is None:
            self.reset()
            return 0
        self.restore(best)
        self.snapshots.append(self.snapshots.pop(self.snapshots.index(best)))
        return len(best.tokens)

    def close(self) -> None:
        """Free everything; closing twice is harmless."""
        while self.snapshots:
            self.evict(self.snapshots[0])
        self._pool.drop(self._pages)
        self._pages = []
        for buffer in self._buffers.values():
            self._host.release(buffer)
        self._buffers = {}
