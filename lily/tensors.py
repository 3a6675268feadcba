"""A checkpoint's tensors under canonical names, checked against the configuration, as kernel operands.

Two layouts exist and three things differ between them (model_spec §2): Hugging Face stores norms zero-centred, the
convolution as ``[C, 1, K]``, and gate and up projections fused; MLX stores 1+w, ``[C, K, 1]``, and projections
apart. Which one a file has is read off the convolution's shape and the experts' names; they have to agree.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from lily.checkpoint import Checkpoint, TensorInfo
from lily.config import ModelConfig, canonical
from lily.errors import CheckpointError
from lily.matrix import Matrix, Region, Vector

__all__ = ["ALIGNMENT", "CheckpointTensors", "Source"]

Source: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Reader: TypeAlias = Callable[[], np.ndarray[Any, Any]]

# Of every region in Lily's own source, in bytes: a cache line, and more than any vector load needs.
ALIGNMENT = 64

MATRIX_FORMATS = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
SCALE_DTYPES = ("BF16", "F16", "F32")
VECTOR_DTYPES = ("BF16", "F16", "F32", "F64")
MLX, HUGGING_FACE = "MLX", "Hugging Face"


class CheckpointTensors:
    """Binds tensors one by one; :meth:`finish` then gives the sources that their regions point into.

    Raises:
        CheckpointError: two tensors have one canonical name, or the layout is mixed or can't be told.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.names: dict[str, str] = {}
        for name in checkpoint.tensors:
            other = self.names.setdefault(canonical(name), name)
            if other != name:
                raise CheckpointError(
                    f"{checkpoint.path}: tensors {other!r} and {name!r} are the same one under two prefixes"
                )
        self.unused = dict(self.names)
        self.own_index = len(checkpoint.shards)
        self.own_nbytes = 0
        self.writes: list[tuple[int, tuple[Reader, ...]]] = []
        self.layout = self._layout()

    def matrix(self, path: str, rows: int, cols: int) -> Matrix:
        """The Linear ``[rows, cols]`` of module ``path``."""
        return self._matrix(path, [path], rows, cols, 0)

    def experts(self, path: str) -> tuple[Matrix, Matrix, Matrix]:
        """Gate, up and down projections of all experts of the mixture at ``path``."""
        hidden, inner = self.config.hidden_size, self.config.moe_intermediate_size
        fused, down = f"{path}.experts.gate_up_proj", f"{path}.experts.down_proj"
        stack = f"{path}.switch_mlp"
        apart = f"{path}.experts.0.gate_proj.weight" in self.names
        if fused in self.names or (self.layout == HUGGING_FACE and not apart):
            return (
                self._fused(f"{stack}.gate_proj", fused, (inner, hidden), 0, 2 * inner),
                self._fused(f"{stack}.up_proj", fused, (inner, hidden), inner, 2 * inner),
                self._fused(f"{stack}.down_proj", down, (hidden, inner), 0, hidden),
            )

        def stacked(part: str, rows: int, cols: int) -> Matrix:
            modules = [f"{stack}.{part}"]
            if apart:
                modules = [f"{path}.experts.{i}.{part}" for i in range(self.config.num_experts)]
            return self._matrix(f"{stack}.{part}", modules, rows, cols, self.config.num_experts)

        return (
            stacked("gate_proj", inner, hidden),
            stacked("up_proj", inner, hidden),
            stacked("down_proj", hidden, inner),
        )

    def vector(self, path: str, shape: tuple[int, ...]) -> Vector:
        """A float32 copy of tensor ``path``; the convolution's ``[C, K]`` is ``[C, 1, K]`` or ``[C, K, 1]`` there."""
        return self._vector(path, shape, 0.0)

    def norm(self, path: str, size: int) -> Vector:
        """The multiplier of an RMS norm whose weight Hugging Face stores zero-centred."""
        return self._vector(path, (size,), 1.0 if self.layout == HUGGING_FACE else 0.0)

    def finish(self) -> list[Source]:
        """The checkpoint's shards, then Lily's own source.

        Raises:
            CheckpointError: the checkpoint holds tensors that nothing was bound to.
        """
        if self.config.tie_word_embeddings:
            self._check_tied()
        if self.unused:
            name = next(iter(self.unused.values()))
            info = self.checkpoint.info(name)
            raise CheckpointError(
                f"{self.checkpoint.file_of(info)}: tensor {name!r} is not part of the model that "
                f"{self.config.source} describes ({len(self.unused)} such tensors)"
            )
        # Anonymous pages: aligned for any device that maps host memory, and touched only as they are filled.
        own: Source = np.frombuffer(mmap.mmap(-1, max(self.own_nbytes, 1)), dtype=np.uint8)
        for begin, reads in self.writes:
            end = begin
            for array in (read().reshape(-1).view(np.uint8) for read in reads):
                own[end : end + array.size] = array
                end += array.size
        own.flags.writeable = False
        return [*(shard.buffer for shard in self.checkpoint.shards), own]

    def _layout(self) -> str:
        config = self.config
        channels, taps = config.conv_dim, config.linear_conv_kernel_dim
        seen: dict[str, str] = {}
        for i in config.linear_layers:
            path = f"layers.{i}.linear_attn.conv1d.weight"
            shape = self._info(path).shape
            if shape not in ((channels, 1, taps), (channels, taps, 1)):
                raise self._wrong(path, f"shape [{channels}, 1, {taps}] or [{channels}, {taps}, 1]")
            seen.setdefault(HUGGING_FACE if shape[1] == 1 else MLX, path)
        for i in range(config.num_hidden_layers):
            for path, layout in (
                (f"layers.{i}.mlp.experts.gate_up_proj", HUGGING_FACE),
                (f"layers.{i}.mlp.switch_mlp.gate_proj.weight", MLX),
            ):
                if path in self.names:
                    seen.setdefault(layout, path)
        if len(seen) == 2:
            raise CheckpointError(
                f"{self.checkpoint.path}: mixed layouts: tensor {self.names[seen[HUGGING_FACE]]!r} is as Hugging "
                f"Face stores it, {self.names[seen[MLX]]!r} as MLX does; convert all of the model or none"
            )
        if not seen:
            raise CheckpointError(
                f"{self.checkpoint.path}: can't tell whether the layout is Hugging Face's or MLX's: there is "
                "neither a convolution nor a stacked expert tensor"
            )
        return next(iter(seen))

    def _fused(self, name: str, path: str, shape: tuple[int, int], first: int, height: int) -> Matrix:
        """Rows ``first .. first + rows`` of every expert of an unquantized tensor ``[experts, height, cols]``."""
        (rows, cols), experts = shape, self.config.num_experts
        info = self._take(path, (experts, height, cols), tuple(MATRIX_FORMATS))
        row = info.nbytes // (experts * height)
        stride = height * row
        region = Region(info.shard, info.offset + first * row, (experts - 1) * stride + rows * row)
        format_ = MATRIX_FORMATS[info.dtype]
        return Matrix(name, rows, cols, experts, format_, 0, region, None, None, stride, 0)

    def _matrix(self, name: str, modules: list[str], rows: int, cols: int, experts: int) -> Matrix:
        """A matrix from one module, or a stack of them from one module for each expert."""
        lead = (experts,) if experts and modules == [name] else ()
        dtype = self._info(f"{modules[0]}.weight").dtype
        stack = max(experts, 1)
        if dtype != "U32":
            if f"{modules[0]}.scales" in self.names:
                raise self._wrong(f"{modules[0]}.weight", "U32, because it has scales")
            dtypes = (dtype,) if dtype in MATRIX_FORMATS else tuple(MATRIX_FORMATS)
            weight = self._place([self._take(f"{module}.weight", (*lead, rows, cols), dtypes) for module in modules])
            stride = weight.nbytes // stack if experts else 0
            return Matrix(name, rows, cols, experts, MATRIX_FORMATS[dtype], 0, weight, None, None, stride, 0)
        bits, group_size = self._setting(name, modules)
        if cols % group_size:
            raise self._wrong(f"{modules[0]}.weight", f"rows of a multiple of {group_size} weights, not {cols}")
        words, groups = (*lead, rows, cols * bits // 32), (*lead, rows, cols // group_size)
        weight = self._place([self._take(f"{module}.weight", words, ("U32",)) for module in modules])
        scale_infos = [self._take(f"{module}.scales", groups, SCALE_DTYPES) for module in modules]
        bias_infos = [self._take(f"{module}.biases", groups, SCALE_DTYPES) for module in modules]
        widen = any(info.dtype != "BF16" for info in scale_infos + bias_infos)
        scales, biases = self._place(scale_infos, widen), self._place(bias_infos, widen)
        return Matrix(
            name,
            rows,
            cols,
            experts,
            f"q{bits}",
            group_size,
            weight,
            scales,
            biases,
            weight.nbytes // stack if experts else 0,
            scales.nbytes // stack if experts else 0,
            "f32" if widen else "bf16",
        )

    def _setting(self, name: str, modules: list[str]) -> tuple[int, int]:
        """``(bits, group_size)`` that the configuration gives for a packed matrix."""
        quantization = self.config.quantization
        settings = {quantization.of(name, module) if quantization else None for module in modules}
        if len(settings) > 1:
            raise CheckpointError(
                f"{self.config.source}: the experts of {name} are quantized differently; they must be alike"
            )
        setting = settings.pop()
        if setting is None:
            raise self._wrong(
                f"{modules[0]}.weight",
                f"{_or(MATRIX_FORMATS)}, because {self.config.source} doesn't quantize it",
            )
        return setting

    def _vector(self, path: str, shape: tuple[int, ...], offset: float) -> Vector:
        stored = shape
        if len(shape) == 2:
            stored = (shape[0], 1, shape[1]) if self.layout == HUGGING_FACE else (*shape, 1)
        info = self._take(path, stored, VECTOR_DTYPES)
        size = math.prod(shape)
        region = self._own(4 * size, lambda: self.checkpoint.float32(info.name) + np.float32(offset))
        return Vector(path, size, region, info.nbytes)

    def _place(self, infos: list[TensorInfo], widen: bool = False) -> Region:
        """One tensor where it lies, or several one after the other, or in float32, in Lily's own source."""
        if len(infos) == 1 and not widen:
            return Region(infos[0].shard, infos[0].offset, infos[0].nbytes)
        read = self.checkpoint.float32 if widen else self.checkpoint.array
        nbytes = sum(math.prod(info.shape) * 4 if widen else info.nbytes for info in infos)
        return self._own(nbytes, *((lambda name=info.name: read(name)) for info in infos))

    def _own(self, nbytes: int, *reads: Reader) -> Region:
        """Reserve bytes of Lily's own source; ``reads`` fill them, one after the other, at the end."""
        offset = -(-self.own_nbytes // ALIGNMENT) * ALIGNMENT
        self.own_nbytes = offset + nbytes
        self.writes.append((offset, reads))
        return Region(self.own_index, offset, nbytes)

    def _take(self, path: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> TensorInfo:
        """A tensor that must have this shape and one of these dtypes; it counts as used."""
        info = self._info(path)
        if info.shape != shape or info.dtype not in dtypes:
            raise self._wrong(path, f"{_or(dtypes)} {list(shape)}")
        self.unused.pop(path, None)
        return info

    def _info(self, path: str) -> TensorInfo:
        if path not in self.names:
            # As the file would call it, judged by a tensor that every model has.
            known = self.names.get("embed_tokens.weight", "") if path.startswith(("layers.", "norm.")) else ""
            prefix = known.removesuffix("embed_tokens.weight")
            raise CheckpointError(f"{self.checkpoint.path}: tensor {prefix + path!r} is missing")
        return self.checkpoint.info(self.names[path])

    def _wrong(self, path: str, expected: str) -> CheckpointError:
        info = self._info(path)
        return CheckpointError(
            f"{self.checkpoint.file_of(info)}: tensor {info.name!r} is {info.dtype} {list(info.shape)}; "
            f"expected {expected}"
        )

    def _check_tied(self) -> None:
        """A tied model may store its output matrix all the same, if it is the input matrix."""
        for suffix in ("weight", "scales", "biases"):
            if name := self.unused.pop(f"lm_head.{suffix}", None):
                embedding = self._info(f"embed_tokens.{suffix}")
                if not np.array_equal(self.checkpoint.array(name), self.checkpoint.array(embedding.name)):
                    raise CheckpointError(
                        f"{self.checkpoint.path}: tensor {name!r} differs from {embedding.name!r}, but "
                        f"tie_word_embeddings is true in {self.config.source}"
                    )


def _or(words: Iterable[str]) -> str:
    return " or ".join(words)
