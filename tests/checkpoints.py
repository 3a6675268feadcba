"""Builders of small checkpoints in every layout, and of the bundled model's Hugging Face twin.

A model is a mapping from canonical MLX-style paths to values: a :class:`Linear` for what a conversion quantizes,
a float32 array for the rest, norms as the multiplier itself. Random values are chosen so that every layout and
dtype holds them exactly: two checkpoints of one model can be compared bit by bit.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lily.checkpoint import Checkpoint, bf16_to_float32
from lily.config import canonical, load_config
from lily.matrix import Matrix, Region, Vector
from lily.weights import ModelWeights

Array: TypeAlias = np.ndarray[Any, Any]

DEMO = Path(__file__).parents[1] / "lily" / "models" / "demo"

LINEAR_ATTENTION, FULL_ATTENTION = "linear_attention", "full_attention"

TINY: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "layer_types": [LINEAR_ATTENTION, FULL_ATTENTION],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "attention_bias": False,
        "attn_output_gate": True,
        "tie_word_embeddings": False,
        "eos_token_id": 7,
    },
}
FLOATS = {"bf16": np.dtype(np.uint16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
QUANTIZATION = {"group_size": 32, "bits": 4, "mode": "affine"}


@dataclass(frozen=True)
class Tensor:
    """A tensor as a file holds it: dtype by the format's name, bits as a numpy array."""

    dtype: str
    array: Array


@dataclass(frozen=True)
class Linear:
    """Affine codes, uint8 ``[.., rows, cols]``, and float32 scales and biases ``[.., rows, cols / group_size]``."""

    codes: Array
    scales: Array
    biases: Array
    bits: int

    def dense(self) -> Array:
        """The weights in float32."""
        group_size = self.codes.shape[-1] // self.scales.shape[-1]
        scales, biases = (np.repeat(part, group_size, axis=-1) for part in (self.scales, self.biases))
        return scales * self.codes.astype(np.float32) + biases

    def words(self) -> Array:
        """The codes packed into uint32, low bits first."""
        per_word = 32 // self.bits
        codes = self.codes.reshape(*self.codes.shape[:-1], -1, per_word).astype(np.uint32)
        shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(self.bits)
        return np.bitwise_or.reduce(codes << shifts, axis=-1).astype(np.uint32)

    def expert(self, index: int) -> Linear:
        return Linear(self.codes[index], self.scales[index], self.biases[index], self.bits)


Model: TypeAlias = dict[str, "Linear | Array"]


def unpack(words: Array, bits: int) -> Array:
    """Affine codes, uint8, of packed uint32 words; the inverse of :meth:`Linear.words`."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)


def to_bf16(values: Array) -> Tensor:
    """Round float32 to bfloat16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return Tensor("BF16", (rounded >> np.uint32(16)).astype(np.uint16))


def to_f16(values: Array) -> Tensor:
    return Tensor("F16", values.astype(np.float16))


def to_f32(values: Array) -> Tensor:
    return Tensor("F32", values.astype(np.float32))


def tiny_config(
    *,
    quantization: Mapping[str, Any] | None = QUANTIZATION,
    outer: Mapping[str, Any] = {},
    **changes: Any,
) -> dict[str, Any]:
    """A small ``config.json``: ``changes`` go into ``text_config``, ``outer`` beside it."""
    config = copy.deepcopy(TINY)
    config["text_config"].update(changes)
    config.update(outer)
    if quantization is not None:
        config["quantization"] = dict(quantization)
    return config


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the keys of ``text_config`` beside the others."""
    return {
        **{key: value for key, value in config.items() if key != "text_config"},
        **config["text_config"],
    }


def random_model(config: Mapping[str, Any], seed: int = 0) -> Model:
    """A random model of a :func:`tiny_config`; what is quantized follows its ``quantization``, or 4 bits."""
    text = config["text_config"]
    settings = config.get("quantization", QUANTIZATION)
    overrides = {canonical(key): value for key, value in settings.items() if "." in key}
    rng = np.random.default_rng(seed)
    model: Model = {}
    for path, shape in linear_shapes(text).items():
        setting = overrides.get(path) or settings
        bits, group_size = setting["bits"], setting["group_size"]
        # A power of two times an integer of 4 or 8 bits, either sign: exact in bfloat16, float16 and float32.
        codes = rng.integers(0, 2**bits, shape, dtype=np.uint8)
        scales = 2.0 ** rng.integers(-7, -3, (*shape[:-1], shape[-1] // group_size))
        scales *= rng.choice([-1.0, 1.0], scales.shape)
        biases = -(2.0 ** (bits - 1)) * scales
        model[path] = Linear(codes, scales.astype(np.float32), biases.astype(np.float32), bits)
    for path, shape in vector_shapes(text).items():
        # Six bits around zero, so that 1 + w is exact in bfloat16 as w is.
        values = rng.integers(-31, 32, shape) / 64
        model[path] = (values + 1.0 if "norm" in path else values).astype(np.float32)
    return model


def linear_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every matrix of a model, by canonical MLX path (model_spec §2)."""
    hidden, experts, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    key_dim = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    heads = text["linear_num_value_heads"]
    value_dim = heads * text["linear_value_head_dim"]
    query_dim = text["num_attention_heads"] * text["head_dim"]
    kv_dim = text["num_key_value_heads"] * text["head_dim"]
    shared = text["shared_expert_intermediate_size"]
    of_kind = {
        LINEAR_ATTENTION: {
            "linear_attn.in_proj_qkv": (2 * key_dim + value_dim, hidden),
            "linear_attn.in_proj_z": (value_dim, hidden),
            "linear_attn.in_proj_b": (heads, hidden),
            "linear_attn.in_proj_a": (heads, hidden),
            "linear_attn.out_proj": (hidden, value_dim),
        },
        FULL_ATTENTION: {
            "self_attn.q_proj": (2 * query_dim, hidden),
            "self_attn.k_proj": (kv_dim, hidden),
            "self_attn.v_proj": (kv_dim, hidden),
            "self_attn.o_proj": (hidden, query_dim),
        },
    }
    moe = {
        "mlp.gate": (experts, hidden),
        "mlp.shared_expert_gate": (1, hidden),
        "mlp.switch_mlp.gate_proj": (experts, inner, hidden),
        "mlp.switch_mlp.up_proj": (experts, inner, hidden),
        "mlp.switch_mlp.down_proj": (experts, hidden, inner),
        "mlp.shared_expert.gate_proj": (shared, hidden),
        "mlp.shared_expert.up_proj": (shared, hidden),
        "mlp.shared_expert.down_proj": (hidden, shared),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (text["vocab_size"], hidden)}
    for i, kind in enumerate(text["layer_types"]):
        shapes.update({f"layers.{i}.{path}": shape for path, shape in (of_kind[kind] | moe).items()})
    return shapes if text["tie_word_embeddings"] else {**shapes, "lm_head": shapes["embed_tokens"]}


def vector_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every unquantized tensor of a model, the convolution as ``[C, K]``."""
    hidden, head_dim = (text["hidden_size"],), (text["head_dim"],)
    heads, value_head = text["linear_num_value_heads"], text["linear_value_head_dim"]
    channels = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + heads * value_head
    norms = {"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    of_kind = {
        LINEAR_ATTENTION: {
            "linear_attn.conv1d.weight": (channels, text["linear_conv_kernel_dim"]),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (value_head,),
        },
        FULL_ATTENTION: {"self_attn.q_norm.weight": head_dim, "self_attn.k_norm.weight": head_dim},
    }
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": hidden}
    for i, kind in enumerate(text["layer_types"]):
        shapes.update({f"layers.{i}.{path}": shape for path, shape in (of_kind[kind] | norms).items()})
    return shapes


def read_mlx(directory: Path) -> Model:
    """The model in a quantized MLX checkpoint."""
    checkpoint, config = Checkpoint.open(directory), load_config(directory)
    model: Model = {}
    for name in checkpoint.tensors:
        module, _, part = name.rpartition(".")
        path = canonical(module)
        if f"{module}.scales" not in checkpoint.tensors:
            values = checkpoint.float32(name)
            model[canonical(name)] = values[..., 0] if ".conv1d." in name else values
        elif part == "weight":
            assert config.quantization is not None
            setting = config.quantization.of(path)
            assert setting is not None
            scales, biases = (checkpoint.float32(f"{module}.{part}") for part in ("scales", "biases"))
            model[path] = Linear(unpack(checkpoint.array(name), setting[0]), scales, biases, setting[0])
    return model


def mlx_tensors(
    model: Model,
    *,
    prefix: str = "language_model.model.",
    lm_head: str = "language_model.",
    quantized: Callable[[str], bool] = lambda path: True,
    dense: Callable[[Array], Tensor] = to_bf16,
    scales: Callable[[Array], Tensor] = to_bf16,
    apart: bool = False,
) -> dict[str, Tensor]:
    """The tensors of an MLX checkpoint.

    Args:
        quantized: which modules stay packed; the others are stored by ``dense``.
        scales: how scales and biases are stored.
        apart: one tensor for each expert.
    """
    tensors: dict[str, Tensor] = {}

    def put(path: str, linear: Linear, packed: bool) -> None:
        name = (lm_head if path == "lm_head" else prefix) + path
        if not packed:
            tensors[f"{name}.weight"] = dense(linear.dense())
            return
        tensors[f"{name}.weight"] = Tensor("U32", linear.words())
        tensors[f"{name}.scales"] = scales(linear.scales)
        tensors[f"{name}.biases"] = scales(linear.biases)

    for path, value in model.items():
        if isinstance(value, Linear):
            if apart and ".switch_mlp." in path:
                for i in range(len(value.codes)):
                    put(path.replace("switch_mlp", f"experts.{i}"), value.expert(i), quantized(path))
            else:
                put(path, value, quantized(path))
        else:
            tensors[prefix + path] = _vector(path, value[..., None] if ".conv1d." in path else value)
    return tensors


def huggingface_tensors(
    model: Model,
    *,
    prefix: str = "model.language_model.",
    dense: Callable[[Array], Tensor] = to_bf16,
    apart: bool = False,
) -> dict[str, Tensor]:
    """The tensors of an unquantized Hugging Face checkpoint: norms minus 1, ``[C, 1, K]``, gate and up fused."""
    zero_centred = re.compile(r"norm\.weight|.*(layernorm|[qk]_norm)\.weight")
    tensors: dict[str, Tensor] = {}
    for path, value in model.items():
        if not isinstance(value, Linear):
            stored = value - np.float32(1) if zero_centred.fullmatch(path) else value
            tensors[prefix + path] = _vector(path, stored[:, None] if ".conv1d." in path else stored)
        elif path == "lm_head":
            tensors["lm_head.weight"] = dense(value.dense())
        elif ".switch_mlp." not in path:
            tensors[f"{prefix}{path}.weight"] = dense(value.dense())
        elif apart:
            for i in range(len(value.codes)):
                name = prefix + path.replace("switch_mlp", f"experts.{i}")
                tensors[f"{name}.weight"] = dense(value.expert(i).dense())
        elif path.endswith("down_proj"):
            tensors[prefix + path.replace("switch_mlp", "experts")] = dense(value.dense())
        elif path.endswith("gate_proj"):
            up = model[path.replace("gate_proj", "up_proj")]
            assert isinstance(up, Linear)
            fused = np.concatenate([value.dense(), up.dense()], axis=1)
            name = path.replace("switch_mlp.gate_proj", "experts.gate_up_proj")
            tensors[prefix + name] = dense(fused)
    return tensors


def _vector(path: str, values: Array) -> Tensor:
    # The release keeps these two in float32, and so do conversions of it.
    return to_f32(values) if path.endswith(("A_log", "linear_attn.norm.weight")) else to_bf16(values)


def encode(tensors: Mapping[str, Tensor], align: int = 8) -> bytes:
    """A safetensors file: tensors in the order given, its data at a multiple of ``align`` bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.array.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % align)
    return b"".join(
        [
            len(text).to_bytes(8, "little"),
            text,
            *(tensor.array.tobytes() for tensor in tensors.values()),
        ]
    )


def save(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    shards: int = 1,
    index: bool | None = None,
) -> Path:
    """Write a checkpoint; more than one shard gets an index unless ``index`` is False. Returns ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        (directory / file).write_bytes(encode({name: tensors[name] for name in part}))
        weight_map.update(dict.fromkeys(part, file))
    if index if index is not None else shards > 1:
        total = sum(tensor.array.nbytes for tensor in tensors.values())
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(content))
    return directory


def write_demo_twin(directory: Path) -> Path:
    """The bundled 4-bit model as Hugging Face would store it: bfloat16, three shards and an index.

    Both have the same value everywhere but in the 8-bit modules (router, shared-expert gate, ``in_proj_a`` and
    ``in_proj_b``), where the twin holds the nearest bfloat16.
    """
    config = json.loads((DEMO / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    save(directory, config, huggingface_tensors(read_mlx(DEMO)), shards=3)
    for file in DEMO.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            (directory / file.name).write_bytes(file.read_bytes())
    return directory


def matrix_values(weights: ModelWeights, matrix: Matrix) -> Array:
    """A bound matrix in float32, ``[rows, cols]`` or ``[experts, rows, cols]``, read through its regions."""
    experts = []
    for i in range(max(matrix.experts, 1)):
        if matrix.format in FLOATS:
            nbytes = matrix.rows * matrix.cols * FLOATS[matrix.format].itemsize
            raw = _expert_bytes(weights, matrix.weight, i * matrix.weight_stride, nbytes)
            experts.append(_widen(raw.view(FLOATS[matrix.format])).reshape(matrix.rows, matrix.cols))
            continue
        bits = {"q4": 4, "q8": 8}[matrix.format]
        raw = _expert_bytes(weights, matrix.weight, i * matrix.weight_stride, matrix.rows * matrix.cols * bits // 8)
        codes = unpack(raw.view(np.uint32), bits).reshape(matrix.rows, matrix.cols)
        dtype = FLOATS[matrix.scale_dtype]
        nbytes = matrix.rows * matrix.cols // matrix.group_size * dtype.itemsize
        assert matrix.scales is not None
        assert matrix.biases is not None
        scales, biases = (
            _widen(_expert_bytes(weights, region, i * matrix.scale_stride, nbytes).view(dtype)).reshape(matrix.rows, -1)
            for region in (matrix.scales, matrix.biases)
        )
        experts.append(Linear(codes, scales, biases, bits).dense())
    return np.stack(experts) if matrix.experts else experts[0]


def vector_values(weights: ModelWeights, vector: Vector) -> Array:
    """A bound vector, float32 ``[size]``."""
    return weights.bytes_of(vector.region).view(np.float32)


def _expert_bytes(weights: ModelWeights, region: Region, begin: int, nbytes: int) -> Array:
    assert begin + nbytes <= region.nbytes, "a region spans every expert"
    return weights.bytes_of(region)[begin : begin + nbytes]


def _widen(values: Array) -> Array:
    return bf16_to_float32(values) if values.dtype == np.uint16 else values.astype(np.float32)
