"""Other engines that Lily is held against. MLX is the ``peers`` extra and never a run-time need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def mlx_logits(model_dir: str | Path, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits [T, V] of MLX-LM in float32 after each of ``tokens``, one prefill without a cache."""
    import mlx.core as mx

    model = load_mlx_float32(model_dir)
    return np.array(model(mx.array([list(tokens)]))[0], dtype=np.float32)


def mlx_greedy(model_dir: str | Path, tokens: Sequence[int], count: int) -> list[int]:
    """``count`` greedy tokens of MLX-LM in float32 after ``tokens``, one cached step each.

    End-of-turn tokens don't end it.
    """
    import mlx.core as mx

    model = load_mlx_float32(model_dir)
    cache = model.make_cache()
    continuation: list[int] = []
    pending = list(tokens)
    while len(continuation) < count:
        chosen = int(mx.argmax(model(mx.array([pending]), cache=cache)[0, -1]).item())
        continuation.append(chosen)
        pending = [chosen]
    return continuation


def load_mlx_float32(model_dir: str | Path) -> Any:
    """MLX-LM's model with every float parameter cast to float32; packed words stay packed.

    In bfloat16 MLX's quantized products on a CPU accumulate in bfloat16, 4.9 % off each; in
    float32 they equal a product with the dequantized matrix (model specification §9).
    """
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(model_dir))

    def widen(parameter: Any) -> Any:
        floating = mx.issubdtype(parameter.dtype, mx.floating)
        return parameter.astype(mx.float32) if floating else parameter

    model.update(tree_map(widen, model.parameters()))
    model.eval()
    return model
