"""The step parameters: what changes from token to token, in a small device buffer that kernels read.

One recorded plan serves many steps because position, token and sampling parameters live here. The layout is
that of ``kernels/cpu/step.h``.
"""

from __future__ import annotations

import numpy as np

__all__ = ["PAGE_TOKENS", "RING", "STEP_DTYPE"]

RING = 64
"""Sampled tokens the device keeps; more than are ever in flight."""

PAGE_TOKENS = 64
"""Tokens a page of the KV cache holds."""

STEP_DTYPE = np.dtype(
    [
        ("position", "<i4"),
        ("token", "<i4"),
        ("count", "<i4"),
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("seed_low", "<u4"),
        ("seed_high", "<u4"),
        ("frequency_penalty", "<f4"),
        ("reserved", "<i4", (4,)),
        ("ring", "<i4", (RING,)),
    ]
)
