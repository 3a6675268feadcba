"""Write ``tests/fixtures/quantize.npz``: what ``mx.quantize`` makes of a few matrices.

Usage, from the repository root, in a virtual environment of its own::

    pip install 'mlx[cpu]==0.32.4'
    python tools/make_quantize_fixture.py

Arrays, for each dtype ``float32``, ``bfloat16`` (as uint16 bit patterns) and ``float16``::

    DTYPE                            [rows, 256], the weights
    DTYPE_BITS_GROUP_words           uint32 [rows, 256 * BITS / 32]
    DTYPE_BITS_GROUP_scales, _biases [rows, 256 / GROUP], in the dtype of the weights

for BITS 4 and 8 and GROUP 32, 64 and 128. ``versions`` is JSON text.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

OUT = Path(__file__).parents[1] / "tests" / "fixtures" / "quantize.npz"
COLS = 256


def weights() -> np.ndarray[Any, Any]:
    """Rows that look like a model's, and rows on the edges of the algorithm; float32 ``[rows, COLS]``."""
    rng = np.random.default_rng(2)
    normal = rng.standard_normal((8, COLS)) * np.logspace(-4, 3, 8)[:, None]
    positive = np.abs(rng.standard_normal((2, COLS)))
    outlier = rng.standard_normal((2, COLS)) * 0.01
    outlier[0, ::40], outlier[1, ::40] = 50.0, -50.0
    edges = [
        np.zeros(COLS),
        np.full(COLS, 5.0),
        np.full(COLS, -5.0),
        rng.standard_normal(COLS) * 1e-7,  # ranges about as small as the smallest scale
        np.where(np.arange(COLS) % 2, 1.0, -1.0),  # both edges are as far from zero
        rng.integers(-15, 16, COLS) / 2,  # weights midway between two codes
        np.where(np.arange(COLS) % 32, 0.0, 3.0),
        rng.standard_normal(COLS) + 100.0,
        rng.standard_normal(COLS) - 100.0,
    ]
    return np.concatenate([normal, positive, -positive, outlier, edges]).astype(np.float32)


def to_numpy(array: mx.array) -> np.ndarray[Any, Any]:
    """numpy has no bfloat16; its bit patterns come as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def main() -> None:
    mx.set_default_device(mx.cpu)
    arrays: dict[str, Any] = {"versions": json.dumps({"mlx": version("mlx")})}
    for dtype in ("float32", "bfloat16", "float16"):
        matrix = mx.array(weights()).astype(getattr(mx, dtype))
        arrays[dtype] = to_numpy(matrix)
        for bits in (4, 8):
            for group in (32, 64, 128):
                for part, array in zip(
                    ("words", "scales", "biases"), mx.quantize(matrix, group_size=group, bits=bits), strict=True
                ):
                    arrays[f"{dtype}_{bits}_{group}_{part}"] = to_numpy(array)
    np.savez_compressed(OUT, **arrays)
    print(f"{OUT}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
