"""A case made concrete: an op whose operands lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lily.checking.case import Case
from lily.checking.memory import Bytes, Memory, decode
from lily.checking.weights import WeightFormat, random_weight
from lily.ops import Op, Operand, Tensor, Weight
from lily.plan import SlotKind
from lily.step import STEP_DTYPE

__all__ = ["EPS", "Builder", "Built", "Operands", "Problem"]

EPS = 1e-6
"""``rms_norm_eps`` of the model (model_spec §1)."""

Operands: TypeAlias = dict[str, Operand]
Built: TypeAlias = tuple[Operands, Mapping[str, float]]
"""Operands and parameters of an op."""


@dataclass(frozen=True)
class Problem:
    """A case made concrete.

    Attributes:
        op: with every operand placed in ``memory``.
        memory: the content of all slots before a run.
        pages: of the KV cache, in the order of the tokens they hold; empty where there is no cache.
    """

    case: Case
    op: Op
    memory: Memory
    pages: NDArray[np.int64]

    def values(self, role: str) -> Any:
        """An operand's elements before a run, float64 or int64."""
        return self.memory.values(self.op.tensor(role))

    def cached(self, role: str, image: Bytes | None = None) -> NDArray[np.float64]:
        """``k_cache`` or ``v_cache`` in the order of the tokens: [tokens of all pages, kv_heads, head_dim].

        Args:
            image: of its slot; before a run, if None.
        """
        tensor = self.op.tensor(role)
        paged = decode(self.memory.image(tensor.view.slot.index) if image is None else image, tensor)
        ordered: NDArray[np.float64] = paged[self.pages].transpose(0, 2, 1, 3)
        return ordered.reshape(-1, tensor.shape[1], tensor.shape[3])


class Builder:
    """Random operands of one case, placed in memory: what the builders of all ops share."""

    def __init__(self, case: Case, memory: Memory) -> None:
        self.case = case
        self.memory = memory
        self.rng = np.random.default_rng(case.seed)
        self.pages = np.zeros(0, np.int64)

    def dim(self, key: str) -> int:
        """A dimension of the case."""
        return self.case.dims[key]

    def normal(self, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        """Normally distributed numbers with deviation ``scale``."""
        drawn: NDArray[np.float32] = self.rng.standard_normal(shape, np.float32) * np.float32(scale)
        return drawn

    def scratch(self, values: Any, dtype: str | None = None) -> Tensor:
        """An activation that holds ``values``."""
        return self.memory.tensor(SlotKind.SCRATCH, values, dtype)

    def activation(self, *shape: int, scale: float = 1.0) -> Tensor:
        """A normally distributed activation."""
        return self.scratch(self.normal(*shape, scale=scale))

    def residual(self, *shape: int) -> Tensor:
        """An activation that is added to."""
        return self.memory.updated(self.activation(*shape, scale=2.0))

    def output(self, *shape: int, dtype: str | None = None) -> Tensor:
        """An activation without content yet."""
        return self.memory.output(SlotKind.SCRATCH, *shape, dtype=dtype)

    def state(self, values: Any, dtype: str | None = None) -> Tensor:
        """State of a session, which is updated."""
        return self.memory.updated(self.memory.tensor(SlotKind.STATE, values, dtype))

    def vector(self, values: Any) -> Tensor:
        """A small float32 tensor of a checkpoint."""
        return self.memory.tensor(SlotKind.WEIGHTS, values, "f32")

    def norm(self, size: int) -> Tensor:
        """Multipliers of an RMS norm."""
        return self.vector(1.0 + self.normal(size, scale=0.2))

    def control(self, values: Any, dtype: str = "i32") -> Tensor:
        """Numbers that tell kernels where and what."""
        return self.memory.tensor(SlotKind.CONTROL, values, dtype)

    def step(self, **fields: float | int) -> Tensor:
        """Step parameters, zero but for ``fields``."""
        step: NDArray[Any] = np.zeros(1, STEP_DTYPE)
        for name, value in fields.items():
            step[name] = value
        return self.control(step.view(np.int32))

    def format(self, index: int) -> WeightFormat:
        """Of the case's ``index``-th weight."""
        return self.case.formats[index % len(self.case.formats)]

    def weight(self, index: int, rows: int, cols: int, experts: int = 0) -> Weight:
        """A random matrix or stack in the case's ``index``-th format."""
        return random_weight(self.memory, self.rng, rows, cols, self.format(index), experts=experts)
