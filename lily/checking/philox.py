"""The sampler's random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""

from __future__ import annotations

__all__ = ["philox", "uniform"]

_WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ k0, high & _WORD, low >> 32 ^ c3 ^ k1, low & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


def uniform(seed: tuple[int, int], count: int) -> float:
    """What the ``count``-th token after the first is drawn with: in [0, 1), 53 bits of the first two words."""
    high, low, _, _ = philox((count, 0, 0, 0), seed)
    return ((high << 32 | low) >> 11) * 2.0**-53
