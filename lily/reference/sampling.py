"""Oracles of the sampler: penalties, and the distribution a token is drawn from.

The order is that of Hugging Face's logits processors: penalties on the raw logits, then
temperature, then top-k, then top-p, then min-p, each on what the one before it left.
Tokens of equal logit are ranked by id, lowest first, so the kept set never depends on a sort's
whim. A logit of -inf (a padded vocabulary row) is never kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lily.reference.bfloat16 import as_float64
from lily.reference.dense import softmax

__all__ = ["greedy", "penalise", "sample_distribution"]

Array = NDArray[np.float64]


def greedy(logits: ArrayLike) -> int:
    """Id of the largest of ``logits`` [V]; the lowest such id among equals."""
    return int(np.argmax(as_float64(logits)))


def penalise(
    logits: ArrayLike,
    seen: ArrayLike,
    generated: ArrayLike,
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Array:
    """Logits [V] after the repetition penalty, then the presence and frequency penalties.

    Args:
        logits: [V].
        seen: [V] occurrences of each id in the whole context; the repetition penalty is applied once to every id
            that occurs, however often.
        generated: [V] occurrences of each id among the generated tokens alone; the other penalties look at these.
        repetition: > 0; a positive logit is divided by it, a negative one multiplied (Keskar et al. 2019, *CTRL*);
            1 is no penalty.
        presence: subtracted once for every generated id (OpenAI's ``presence_penalty``); 0 is no penalty.
        frequency: subtracted for every time an id was generated (``frequency_penalty``); 0 is no penalty.
    """
    values, occurrences = as_float64(logits), np.asarray(generated)
    repeated = np.where(values > 0, values / repetition, values * repetition)
    values = np.where(np.asarray(seen) > 0, repeated, values)
    return np.asarray(values - presence * (occurrences > 0) - frequency * occurrences)


def sample_distribution(
    logits: ArrayLike,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Array:
    """Probability of each id [V], float64, zero for every id that is filtered out; the sum is 1.

    Args:
        logits: [V], penalties already applied; -inf for ids that must never be drawn, at least one
            finite.
        temperature: divides the logits; 0 means greedy: probability 1 for the largest logit, lowest
            id of equals.
        top_k: keep this many of the largest logits; 0 keeps all.
        top_p: in the distribution left by top-k, renormalised, keep the shortest prefix of the
            ranking whose probabilities sum to at least ``top_p``, so the token that crosses it
            stays and one always does; 1 keeps all.
        min_p: keep ids with at least ``min_p`` times the largest probability; 0 keeps all.
    """
    values = as_float64(logits)
    if temperature == 0.0:
        certain = np.zeros_like(values)
        certain[greedy(values)] = 1.0
        return certain
    # Subtracting the largest first keeps a tiny temperature from overflowing to inf - inf.
    scaled = (values - values.max()) / temperature
    ranking = np.argsort(-scaled, kind="stable")
    if top_k > 0:
        ranking = ranking[:top_k]
    kept = softmax(scaled[ranking])
    if top_p < 1.0:
        preceding = np.concatenate([[0.0], np.cumsum(kept)[:-1]])
        length = max(1, int(np.count_nonzero(preceding < top_p)))
        ranking, kept = ranking[:length], kept[:length]
    above = kept >= min_p * kept[0]
    probabilities = np.zeros_like(values)
    probabilities[ranking[above]] = kept[above] / kept[above].sum()
    return probabilities
