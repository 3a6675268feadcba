"""Whether a model fits in memory: what it needs at a context, and the largest context that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lily.config import ModelConfig
from lily.memory import StateLayout
from lily.model import StepShape
from lily.plan_report import record, require_variants, scratch_bytes
from lily.policy import Policy
from lily.registry import Registry
from lily.step import PAGE_TOKENS
from lily.weights import abstract_weights

__all__ = ["Fit", "ModelSize", "model_size"]

PROGRAM_BYTES = 200_000_000
"""The interpreter, its libraries, tokenizer and plans: what a process needs beside the model."""

Verdict = Literal["yes", "slow", "no", "unknown"]


@dataclass(frozen=True)
class Fit:
    """A model at one context, held against the memory there is.

    Attributes:
        kv_bytes: keys and values of so many tokens.
        needed_bytes: weights, state, keys and values, scratch and the program.
        verdict: ``slow``: all but the weights fits, and those are mapped files.
        reason: a sentence without its full stop.
    """

    context: int
    kv_bytes: int
    needed_bytes: int
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class ModelSize:
    """What one session of a model occupies, under one policy.

    Attributes:
        limit: tokens the model was made for.
        checkpoint_bytes: weights, as stored.
        state_bytes: recurrent and convolution state.
        kv_page_bytes: keys and values of PAGE_TOKENS tokens.
        scratch_bytes: temporaries of the largest step, at the model's limit.
    """

    name: str
    limit: int
    checkpoint_bytes: int
    state_bytes: int
    kv_page_bytes: int
    scratch_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """What does not grow with the context, weights included."""
        return self.checkpoint_bytes + self.state_bytes + self.scratch_bytes + PROGRAM_BYTES

    def kv_bytes(self, context: int) -> int:
        """Keys and values, in whole pages."""
        return -(-context // PAGE_TOKENS) * self.kv_page_bytes

    def largest_context(self, available: int) -> int:
        """Tokens that fit in ``available`` bytes; 0 if not even a page does."""
        pages = max(available - self.fixed_bytes, 0) // self.kv_page_bytes
        return min(pages * PAGE_TOKENS, self.limit)

    def fit(self, context: int, available: int | None) -> Fit:
        """The model at a context in ``available`` bytes of memory; None if nobody knows how many there are."""
        kv = self.kv_bytes(context)
        needed = self.fixed_bytes + kv
        verdict, reason = self._judge(needed, available)
        return Fit(context, kv, needed, verdict, reason)

    def _judge(self, needed: int, available: int | None) -> tuple[Verdict, str]:
        wants = f"it needs {needed / 1e9:.2f} GB"
        if available is None:
            return "unknown", f"{wants}, and this system does not say how much is available"
        has = f"{available / 1e9:.2f} GB are available"
        if needed <= available:
            return "yes", f"{wants} and {has}"
        largest = self.largest_context(available)
        if largest:
            return "no", f"{wants} but only {has}; the largest context that fits is {largest:,}"
        own = needed - self.checkpoint_bytes
        if own <= available:
            return "slow", f"{wants} but only {has}: weights would be read from disk again and again"
        return "no", f"{wants} but only {has}, less than the {own / 1e9:.2f} GB it needs beside its weights"


def model_size(config: ModelConfig, name: str, policy: Policy, registry: Registry) -> ModelSize:
    """Sizes of a model under a policy, from plans of its largest steps.

    Raises:
        HostError, ConfigError, PolicyError: no such plan can be made, see :func:`lily.plan_report.plan_report`.
    """
    require_variants(policy, registry)
    weights = abstract_weights(config)
    limit = config.max_position_embeddings
    shapes = [
        StepShape("decode", 1, limit, "sample"),
        StepShape("prefill", min(policy.execution.prefill_chunk, limit), limit, "sample"),
    ]
    made = [(shape, *record(weights, policy, registry, shape)) for shape in shapes]
    _, _, host, pool = made[0]
    return ModelSize(
        name=name,
        limit=limit,
        checkpoint_bytes=weights.stored_nbytes,
        state_bytes=StateLayout(config, host.activation_dtype).nbytes,
        kv_page_bytes=pool.page_nbytes,
        scratch_bytes=max(scratch_bytes(recorder, config, shape) for shape, recorder, _, _ in made),
    )
