"""The numbers of ``config.json`` that the engine runs on, and a refusal of everything it can't run.

Accepted is the text model of the Qwen3.5/3.6 MoE family (``model_type`` ``qwen3_5_moe`` or
``qwen3_5_moe_text``), its keys nested under ``text_config`` or flat, with the affine quantization settings that
MLX conversions write. Keys and their meaning: model_spec §1 and §2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lily.config_keys import Keys
from lily.errors import ConfigError
from lily.json_file import read_json_object, shown

__all__ = ["ModelConfig", "Quantization", "canonical", "load_config", "parse_config"]

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
LAYER_TYPES = ("linear_attention", "full_attention")
# "mrope" gives text the same rotations as "default": the three positions of a text token are equal (spec §5).
ROPE_TYPES = ("default", "mrope")
BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)

# Longest first, so that a name loses the whole of its prefix.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")

# Keys that change the arithmetic, and the one value of each that this engine computes; absent means that value.
FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "norm_topk_prob": (True,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "use_sliding_window": (False,),
}


def canonical(path: str) -> str:
    """A module or tensor name without the prefix its format puts before it.

    ``language_model.model.layers.0.mlp.gate`` (MLX), ``model.language_model.layers.0.mlp.gate`` (Hugging Face)
    and ``model.layers.0.mlp.gate`` (text-only exports) all become ``layers.0.mlp.gate``.
    """
    for prefix in PREFIXES:
        if path.startswith(prefix):
            return path[len(prefix) :]
    return path


@dataclass(frozen=True)
class Quantization:
    """Affine quantization settings of a checkpoint (model_spec §2).

    Attributes:
        bits: 4 or 8, where no override says otherwise.
        group_size: weights along a row that share a scale and a bias.
        overrides: by canonical module path: ``(bits, group_size)``, or None for an unquantized module.
    """

    bits: int
    group_size: int
    overrides: Mapping[str, tuple[int, int] | None] = field(default_factory=dict, hash=False)

    def of(self, *paths: str) -> tuple[int, int] | None:
        """``(bits, group_size)`` of a module, or None if it is not quantized.

        Args:
            paths: the module's path, with any prefix; more than one if it goes by several names, the first
                with an override wins.
        """
        for path in map(canonical, paths):
            if path in self.overrides:
                return self.overrides[path]
        return self.bits, self.group_size


@dataclass(frozen=True)
class ModelConfig:
    """A model's dimensions, under the names ``config.json`` gives them.

    Attributes:
        layer_types: ``"linear_attention"`` or ``"full_attention"`` for each layer.
        rotary_dim: leading dimensions of a head that rotary embedding turns, even.
        eos_token_ids: from ``eos_token_id``, possibly empty.
        quantization: None if no tensor is quantized.
        source: where it was read from, for messages.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None
    source: str = field(default="config.json", compare=False, repr=False)

    @property
    def key_dim(self) -> int:
        """Width of DeltaNet's queries, and of its keys: all key heads together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of DeltaNet's values, and of its output gate: all value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of DeltaNet's convolution: queries, keys, values, in this order."""
        return 2 * self.key_dim + self.value_dim

    @property
    def value_heads_per_key_head(self) -> int:
        """Value heads that share one DeltaNet key head; consecutive ones do."""
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def query_dim(self) -> int:
        """Width of full attention's queries, and of its output gate: all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of full attention's keys, and of its values: all key-value heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def gqa_group(self) -> int:
        """Query heads that share one key-value head; consecutive ones do."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the Gated DeltaNet layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")


def load_config(path: str | Path) -> ModelConfig:
    """Read a model's configuration.

    Args:
        path: a model's directory, its ``config.json``, or a ``.safetensors`` file beside it.

    Raises:
        ConfigError: the file is missing or not JSON, or as in :func:`parse_config`.
    """
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    elif file.suffix == ".safetensors":
        file = file.with_name("config.json")
    mapping = read_json_object(file)
    if mapping is None:
        raise ConfigError(f"{file}: no such file; a model's directory holds its config.json")
    return parse_config(mapping, str(file))


def parse_config(mapping: object, source: str) -> ModelConfig:
    """Check a parsed ``config.json``.

    Args:
        mapping: the JSON value.
        source: where it came from; messages begin with it.

    Raises:
        ConfigError: a key is missing, has the wrong type, or describes a model this engine can't run; the
            message names the key and its value.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{source}: expected a JSON object; found {shown(mapping)}")
    outer = Keys(mapping, source)
    outer.choice("model_type", MODEL_TYPES)
    text = outer.section("text_config") or outer
    if "model_type" in text.mapping:
        text.choice("model_type", MODEL_TYPES)
    for key, allowed in FIXED.items():
        if text.mapping.get(key) is not None:
            text.choice(key, allowed)

    layer_types = _layer_types(text)
    head_dim = text.integer("head_dim")
    rope_theta, rotary_dim = _rope(text, head_dim)
    num_experts = text.integer("num_experts", maximum=65_536)
    return ModelConfig(
        hidden_size=text.integer("hidden_size"),
        num_hidden_layers=len(layer_types),
        vocab_size=text.integer("vocab_size"),
        layer_types=layer_types,
        num_attention_heads=text.multiple("num_attention_heads", "num_key_value_heads"),
        num_key_value_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        linear_num_key_heads=text.integer("linear_num_key_heads"),
        linear_num_value_heads=text.multiple("linear_num_value_heads", "linear_num_key_heads"),
        linear_key_head_dim=text.integer("linear_key_head_dim"),
        linear_value_head_dim=text.integer("linear_value_head_dim"),
        linear_conv_kernel_dim=text.integer("linear_conv_kernel_dim", minimum=2),
        num_experts=num_experts,
        num_experts_per_tok=text.integer("num_experts_per_tok", maximum=num_experts),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        shared_expert_intermediate_size=text.integer("shared_expert_intermediate_size"),
        rms_norm_eps=text.number("rms_norm_eps"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        tie_word_embeddings=_tie(outer, text),
        eos_token_ids=_eos(text if text.mapping.get("eos_token_id") is not None else outer),
        quantization=_quantization(outer) or _quantization(text),
        source=source,
    )


def _layer_types(text: Keys) -> tuple[str, ...]:
    layers = text.integer("num_hidden_layers", maximum=10_000)
    types = text.mapping.get("layer_types")
    if types is None:
        interval = text.integer("full_attention_interval")
        return tuple(LAYER_TYPES[(i + 1) % interval == 0] for i in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise text.wrong("layer_types", f"a list with one entry for each of the {layers} layers")
    for i, kind in enumerate(types):
        if kind not in LAYER_TYPES:
            raise ConfigError(
                f"{text.source}: {text.prefix}layer_types[{i}] is {shown(kind)}; expected {' or '.join(LAYER_TYPES)}"
            )
    return tuple(types)


def _rope(text: Keys, head_dim: int) -> tuple[float, int]:
    """``(rope_theta, rotary_dim)``, from ``rope_parameters``, ``rope_scaling``, or keys beside the others."""
    sections = [text.section("rope_parameters"), text.section("rope_scaling")]
    found = [section for section in sections if section is not None]
    for section in found:
        for key in ("rope_type", "type"):
            if section.mapping.get(key) is not None:
                section.choice(key, ROPE_TYPES)
    places = [*found, text]

    def place(key: str) -> Keys:
        return next((keys for keys in places if keys.mapping.get(key) is not None), places[0])

    factor = place("partial_rotary_factor").number("partial_rotary_factor")
    rotary_dim = int(head_dim * factor)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise place("partial_rotary_factor").wrong(
            "partial_rotary_factor",
            f"a part of head_dim {head_dim} that is an even number of dimensions, not {rotary_dim}",
        )
    return place("rope_theta").number("rope_theta"), rotary_dim


def _tie(outer: Keys, text: Keys) -> bool:
    given = {}
    for keys in (outer, text):
        if keys.mapping.get("tie_word_embeddings") is not None:
            keys.choice("tie_word_embeddings", (False, True))
            given[keys.prefix] = bool(keys.mapping["tie_word_embeddings"])
    if len(set(given.values())) > 1:
        raise outer.wrong("tie_word_embeddings", "the same value as in text_config")
    return next(iter(given.values()), False)


def _eos(keys: Keys) -> tuple[int, ...]:
    value = keys.mapping.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise keys.wrong("eos_token_id", "a token id or a list of them")
    return tuple(ids)


def _quantization(keys: Keys) -> Quantization | None:
    # MLX writes both keys with one content, for readers that know only Hugging Face's.
    section = keys.section("quantization") or keys.section("quantization_config")
    if section is None:
        return None
    if section.mapping.get("quant_method") is not None:
        section.choice("quant_method", ("affine", "mlx"))
    bits, group_size = _bits(section)
    overrides: dict[str, tuple[int, int] | None] = {}
    for key, value in section.mapping.items():
        path = canonical(key)
        if path.partition(".")[0] not in ("layers", "embed_tokens", "lm_head"):
            continue  # the settings themselves, or a module outside the text model
        if isinstance(value, bool):
            override = (bits, group_size) if value else None
        elif isinstance(value, Mapping):
            override = _bits(Keys(value, section.source, f"{section.prefix}{key}."))
        else:
            raise section.wrong(key, 'false, or an object with "bits" and "group_size"')
        if overrides.setdefault(path, override) != override:
            raise section.wrong(key, f"the same as the other override of {path}")
    return Quantization(bits, group_size, overrides)


def _bits(keys: Keys) -> tuple[int, int]:
    if keys.mapping.get("mode") is not None:
        keys.choice("mode", ("affine",))
    keys.choice("bits", BITS)
    keys.choice("group_size", GROUP_SIZES)
    return keys.mapping["bits"], keys.mapping["group_size"]
