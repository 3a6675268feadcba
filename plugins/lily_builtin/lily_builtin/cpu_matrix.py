"""Packed matrices as the CPU kernels take them: their description, their inputs' forms, and how work is cut.

The layouts are those of kernels/cpu/matrix.h, gemv.h and gemm.h.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence

from lily.ops import Tensor, Weight
from lily.plan import View
from lily_builtin.encoding import FORMATS

__all__ = [
    "FLOAT",
    "GEMV_TASK_ROWS",
    "MAX_BLOCK",
    "MAX_TOKENS",
    "NO_MATRIX",
    "WIDEST",
    "block_rows",
    "codes",
    "gemm_bytes",
    "gemv_bytes",
    "grain",
    "input_floats",
    "numbered",
    "pack_matrix",
    "padded",
    "row_bytes",
    "row_form",
    "rows_of",
]

FLOAT = 4
MAX_BLOCK = 128
"""``kMaxBlock``: columns of one load, over all formats and vector widths."""
WIDEST = 16
"""Floats of the widest vector: panels hold whole vectors of tokens."""
MAX_TOKENS = 8
"""``kMaxTokens``: token rows a GEMV takes at a time and each thread prepares; more take more dispatches."""
GEMV_TASK_ROWS = 16
"""``kTaskRows``: outputs of a GEMV's task."""
MIN_GROUP = 32
QUAD = 4
"""``kQuad``: matrix rows a GEMV computes together."""
BLOCK_ROWS, DEPTH, SUM_STRIDE = 96, 256, 272
"""``kBlockRows``, ``kDepth`` and ``kSumStride``: what a GEMM keeps in worker scratch."""
GRAB_BYTES = 256 << 10
"""Weights a thread takes at a time: some tens of microseconds."""
GRABS = 32
"""Grabs a dispatch is cut into at least, if it has that many tasks, so that 2 to 16 threads end together."""

_MATRIX = struct.Struct("<8I2Q")
NO_MATRIX = bytes(_MATRIX.size)


def padded(n: int, unit: int) -> int:
    """``n`` rounded up to a multiple of ``unit``."""
    return -(-n // unit) * unit


def pack_matrix(weight: Weight, form: int = 0) -> bytes:
    """``MatrixShape``; ``form`` is which of the dispatch's prepared inputs the matrix multiplies."""
    return _MATRIX.pack(
        weight.rows,
        weight.cols,
        max(weight.experts, 1),
        FORMATS[weight.format],
        weight.group_size,
        int(weight.scale_dtype == "f32"),
        form,
        0,
        weight.weight_stride,
        weight.scale_stride,
    )


def codes(weight: Weight) -> int:
    """Columns that lie in one 32-bit word, if they are quantized: what the order of a prepared input depends on."""
    return {"q4": 8, "q8": 4}.get(weight.format, 1)


def row_form(weight: Weight) -> tuple[int, int]:
    """What the prepared input of a GEMV depends on: the order of its columns, and the groups that are summed."""
    return codes(weight), weight.group_size


def numbered(forms: Sequence[Hashable]) -> list[int]:
    """For each form its number among the distinct ones, in order of appearance."""
    seen = list(dict.fromkeys(forms))
    return [seen.index(form) for form in forms]


def row_bytes(weight: Weight) -> int:
    """Bytes of one row: weight, scales and biases."""
    return weight.moved() // weight.rows


def rows_of(tensor: Tensor, first: int, count: int) -> View:
    """Rows ``first`` to ``first + count`` of a float32 ``[rows, ...]`` tensor."""
    row = tensor.view.nbytes // tensor.shape[0]
    return tensor.view.part(first * row, count * row)


def _padded_groups(cols: int) -> int:
    return padded(cols // MIN_GROUP, 16) + 16


def input_floats(cols: int) -> int:
    """One token row prepared for a GEMV."""
    return padded(cols, MAX_BLOCK) + _padded_groups(cols)


def gemv_bytes(cols: int, prepared_floats: int) -> int:
    """Worker scratch of a GEMV over at most ``cols`` columns: ``GemvScratch``."""
    return FLOAT * (QUAD * _padded_groups(cols) + padded(cols, MAX_BLOCK) + prepared_floats)


def gemm_bytes(packed_tokens: int = 0, cols: int = 0) -> int:
    """Worker scratch of a GEMM that packs ``packed_tokens`` itself: ``GemmScratch``."""
    return FLOAT * (BLOCK_ROWS * (DEPTH + SUM_STRIDE) + packed_tokens * padded(cols, MAX_BLOCK))


def block_rows(rows: int) -> int:
    """Weight rows of a GEMM's task: many, as each task reads all tokens, but so that the tasks balance."""
    return next((block for block in (96, 48) if rows >= GRABS * block), 24)


def grain(tasks: int, task_bytes: int) -> int:
    """Tasks a thread takes at a time."""
    return max(1, min(GRAB_BYTES // max(task_bytes, 1), tasks // GRABS))
