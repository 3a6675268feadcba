"""One workload of one op."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from lily.checking.weights import Q4, WeightFormat
from lily.ops import OPS, Phase

__all__ = ["Case", "shape_of"]

_WEIGHTED = ("embed", "linear", "moe.route", "moe.experts_in", "moe.experts_out", "logits")


@dataclass(frozen=True)
class Case:
    """One workload of one op.

    Attributes:
        dims: what the op's shape and operands are derived from: see the table of its op.
        formats: of the weights; where there are more weights than formats, they repeat.
        cache_dtype: of the KV cache.
        scenario: what is special about the values, see :mod:`lily.checking.operands`.
    """

    op: str
    phase: Phase
    dims: Mapping[str, int] = field(hash=False)
    formats: tuple[WeightFormat, ...] = (Q4,)
    cache_dtype: str = "f32"
    scenario: str = ""

    @property
    def name(self) -> str:
        """All there is to know about the case, in one line; unique in its table."""
        dims = " ".join(f"{key}={value}" for key, value in self.dims.items())
        formats = "+".join(map(str, self.formats)) if self.op in _WEIGHTED else ""
        cache = f"kv-{self.cache_dtype}" if self.op.startswith("attention") else ""
        return " ".join(filter(None, (self.op, self.phase, dims, formats, cache, self.scenario)))

    @property
    def seed(self) -> int:
        """Of the case's random numbers: the same in every run."""
        return zlib.crc32(self.name.encode())


def shape_of(case: Case) -> dict[str, int]:
    """The workload shape of a case: the keys of its op's spec."""
    dims = case.dims
    outs = [value for key, value in dims.items() if key.startswith("out")]
    known = {
        "rows": dims.get("advance", 1),
        "bits": min(fmt.bits for fmt in case.formats[: max(len(outs), 1)]),
        "out_features": sum(outs),
        "parts": len(outs),
        **dims,
    }
    if "kv_heads" in dims:
        known["gqa_group"] = dims["heads"] // dims["kv_heads"]
    if "top_k" in dims:
        known["rows_per_expert"] = dims["rows"] * dims["top_k"] // dims["experts"]
    return {key: known[key] for key in OPS[case.op].shape}
