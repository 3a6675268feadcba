"""Settings of the sampler that are tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SCENARIOS", "Sampler"]


@dataclass(frozen=True)
class Sampler:
    """Parameters as in :class:`lily.sampling.SamplingParams`; ``spread`` is the deviation of the logits."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    spread: float = 3.0


SCENARIOS: Mapping[str, Sampler] = {
    "greedy": Sampler(temperature=0.0),
    "greedy-penalised": Sampler(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    "plain": Sampler(),
    "cold": Sampler(temperature=0.05),
    "hot": Sampler(temperature=5.0),
    "top-k": Sampler(temperature=0.8, top_k=5),
    "top-k-1": Sampler(temperature=0.8, top_k=1),
    "top-p": Sampler(temperature=1.2, top_p=0.6),
    "top-p-tiny": Sampler(top_p=1e-6),
    "min-p": Sampler(temperature=1.5, min_p=0.2),
    "all": Sampler(0.7, 20, 0.8, 0.05, 1.1, 0.4, 0.2),
    "flat": Sampler(top_k=50, top_p=0.9, spread=0.0),
}
