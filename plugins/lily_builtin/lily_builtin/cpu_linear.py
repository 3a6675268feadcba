"""CPU variants of the dense ops that read weights: embed, linear and logits (model_spec §3 and §4)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lily.ops import Op, Tensor, Weight
from lily.plan import Access, Plan, View, read, update, write
from lily.registry import KernelVariant, Option
from lily_builtin.cpu_matrix import (
    FLOAT,
    GEMV_TASK_ROWS,
    MAX_BLOCK,
    MAX_TOKENS,
    NO_MATRIX,
    WIDEST,
    block_rows,
    codes,
    gemm_bytes,
    gemv_bytes,
    grain,
    input_floats,
    numbered,
    pack_matrix,
    padded,
    row_bytes,
    row_form,
    rows_of,
)
from lily_builtin.encoding import empty_like, matrix

__all__ = ["TILE_ROWS", "VARIANTS", "Projection", "encode_gemm_of", "encode_gemv_of"]

MAX_PARTS = 4
TILE_ROWS = Option(32, (16, 32), "token rows whose sums a register tile holds")


@dataclass(frozen=True)
class Projection:
    """Matrices that share an input: ``y[i] = norm(x) @ w[i]ᵀ``, and with ``residual`` ``y[0] += …``.

    Attributes:
        x: f32 ``[rows, cols]``.
        norm: f32 ``[cols]``, the multiplier of an RMS norm of x; None for no norm.
        parts: up to four pairs of weight ``[n, cols]`` and output f32 ``[rows, n]``.
    """

    x: Tensor
    norm: Tensor | None
    parts: Sequence[tuple[Weight, Tensor]]
    eps: float = 0.0
    residual: bool = False

    @staticmethod
    def of_linear(op: Op) -> Projection:
        parts = [(op.weight(f"w{i}"), op.tensor(f"y{i}")) for i in range(op.shape["parts"])]
        norm = op.tensor("norm") if op.has("norm") else None
        return Projection(op.tensor("x"), norm, parts, op.params["eps"], bool(op.params["residual"]))

    @staticmethod
    def of_logits(op: Op) -> Projection:
        parts = [(op.weight("head"), op.tensor("logits"))]
        return Projection(op.tensor("x"), op.tensor("norm"), parts, op.params["eps"])

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def cols(self) -> int:
        return self.parts[0][0].cols

    def norm_view(self) -> View:
        return empty_like(self.x.view) if self.norm is None else self.norm.view

    def weights(self) -> list[Access]:
        """The three arguments of each part, and empty ones for the parts that are missing."""
        empty = [read(empty_like(self.x.view))] * (3 * (MAX_PARTS - len(self.parts)))
        return [access for weight, _ in self.parts for access in matrix(weight)] + empty

    def outputs(self, views: Sequence[View]) -> list[Access]:
        """The output argument of each part, over these views."""
        accesses = [update(view) if self.residual and i == 0 else write(view) for i, view in enumerate(views)]
        return accesses + [write(empty_like(self.x.view))] * (MAX_PARTS - len(self.parts))

    def shapes(self, forms: Sequence[int]) -> bytes:
        """Each part's description; ``forms`` numbers the prepared input it takes."""
        packed = [pack_matrix(weight, form) for (weight, _), form in zip(self.parts, forms, strict=True)]
        return b"".join(packed + [NO_MATRIX] * (MAX_PARTS - len(packed)))


def encode_gemv_of(projection: Projection, plan: Plan) -> None:
    """One dispatch for each eight token rows: norm, all parts, residual."""
    cols, parts = projection.cols, projection.parts
    forms = numbered([row_form(weight) for weight, _ in parts])
    distinct = max(forms) + 1
    tasks = sum(-(-weight.rows // GEMV_TASK_ROWS) for weight, _ in parts)
    widest_row = max(row_bytes(weight) for weight, _ in parts)
    for first in range(0, projection.rows, MAX_TOKENS):
        tokens = min(MAX_TOKENS, projection.rows - first)
        flags = (projection.norm is not None, projection.residual)
        plan.dispatch(
            "gemv",
            [
                read(rows_of(projection.x, first, tokens)),
                read(projection.norm_view()),
                *projection.weights(),
                *projection.outputs([rows_of(y, first, tokens) for _, y in parts]),
            ],
            constants=struct.pack("<6IfI", tokens, cols, len(parts), distinct, *map(int, flags), projection.eps, 0)
            + projection.shapes(forms),
            tasks=tasks,
            threads=grain(tasks, GEMV_TASK_ROWS * widest_row),
            worker_bytes=gemv_bytes(cols, distinct * tokens * input_floats(cols)),
        )


def encode_gemv_split_of(projection: Projection, plan: Plan) -> None:
    """A dispatch for the norm, then one a part (for each eight token rows)."""
    x = projection.x
    if projection.norm is not None:
        rows, cols = projection.rows, projection.cols
        x = Tensor(plan.scratch(rows * cols * FLOAT), (rows, cols))
        plan.dispatch(
            "norm_rows",
            [read(projection.x.view), read(projection.norm.view), write(x.view)],
            constants=struct.pack("<2IfI", rows, cols, projection.eps, 0),
            tasks=rows,
        )
    for i, part in enumerate(projection.parts):
        encode_gemv_of(Projection(x, None, [part], residual=projection.residual and i == 0), plan)


def encode_gemm_of(projection: Projection, plan: Plan, tile_rows: int) -> None:
    """A dispatch that packs the tokens (and normalises them), then one for all parts and the residual."""
    rows, cols, parts = projection.rows, projection.cols, projection.parts
    layouts = numbered([codes(weight) for weight, _ in parts])
    each = list(dict.fromkeys(codes(weight) for weight, _ in parts))
    layout_floats = padded(rows, WIDEST) * padded(cols, MAX_BLOCK)
    panels = plan.scratch(len(each) * layout_floats * FLOAT)
    plan.dispatch(
        "gemm_pack",
        [read(projection.x.view), read(projection.norm_view()), write(panels)],
        constants=struct.pack(
            "<8If3I",
            *(rows, cols, tile_rows, len(each)),
            *(each + [0] * (3 - len(each))),
            int(projection.norm is not None),
            projection.eps,
            *(layout_floats, 0, 0),
        ),
        tasks=-(-rows // tile_rows),
    )
    block = block_rows(sum(weight.rows for weight, _ in parts))
    plan.dispatch(
        "gemm",
        [read(panels), *projection.weights(), *projection.outputs([y.view for _, y in parts])],
        constants=struct.pack(
            "<8I", rows, cols, tile_rows, block, len(parts), int(projection.residual), layout_floats, 0
        )
        + projection.shapes(layouts),
        tasks=sum(-(-weight.rows // block) for weight, _ in parts),
        worker_bytes=gemm_bytes(),
    )


def encode_embed(op: Op, plan: Plan) -> None:
    """One dispatch; a task is a token row."""
    table, tokens, x = op.weight("table"), op.tensor("tokens"), op.tensor("x")
    rows = op.shape["rows"]
    plan.dispatch(
        "embed_rows",
        [read(tokens.view), *matrix(table, rows * row_bytes(table)), write(x.view)],
        constants=struct.pack("<2I", rows, 0) + pack_matrix(table),
        tasks=rows,
        threads=8,
    )


def encode_linear_gemv(op: Op, plan: Plan) -> None:
    encode_gemv_of(Projection.of_linear(op), plan)


def encode_linear_gemv_split(op: Op, plan: Plan) -> None:
    encode_gemv_split_of(Projection.of_linear(op), plan)


def encode_linear_gemm(op: Op, plan: Plan, tile_rows: int) -> None:
    encode_gemm_of(Projection.of_linear(op), plan, tile_rows)


def encode_logits_gemv(op: Op, plan: Plan) -> None:
    encode_gemv_of(Projection.of_logits(op), plan)


def encode_logits_gemm(op: Op, plan: Plan, tile_rows: int) -> None:
    encode_gemm_of(Projection.of_logits(op), plan, tile_rows)


VARIANTS: list[KernelVariant] = [
    KernelVariant(
        op="embed",
        name="rows",
        host="cpu",
        encode=encode_embed,
        summary="a task dequantises one row",
    ),
    KernelVariant(
        op="linear",
        name="gemv",
        host="cpu",
        encode=encode_linear_gemv,
        summary="norm, all parts and residual in one dispatch; weights pass once for up to eight rows",
    ),
    KernelVariant(
        op="linear",
        name="gemv_split",
        host="cpu",
        encode=encode_linear_gemv_split,
        summary="a dispatch for the norm, then one a part",
    ),
    KernelVariant(
        op="linear",
        name="gemm",
        host="cpu",
        encode=encode_linear_gemm,
        summary="tokens packed into tiles, blocks of weights dequantised once for all of them",
        options={"tile_rows": TILE_ROWS},
    ),
    KernelVariant(
        op="logits",
        name="gemv",
        host="cpu",
        encode=encode_logits_gemv,
        summary="norm and projection in one dispatch",
    ),
    KernelVariant(
        op="logits",
        name="gemm",
        host="cpu",
        encode=encode_logits_gemm,
        summary="tokens normalised and packed into tiles, then multiplied",
        options={"tile_rows": TILE_ROWS},
    ),
]
