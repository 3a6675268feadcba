"""Write ``tests/fixtures/logits_*.npz``: what MLX-LM and transformers compute on the demo model.

Both engines run in float32 on the same 4-bit file. MLX reads it directly; for transformers every
tensor is dequantized in float32 and renamed to the Hugging Face layout. The prompts are rendered
and encoded by transformers' tokenizer with the checkpoint's chat template, so they also hold
Lily's own template and tokenizer to account.

Usage, from the repository root, in a virtual environment of its own (Python 3.11)::

    pip install torch==2.13.0 transformers==5.24.0 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
    python tools/make_fixtures.py            # writes tests/fixtures
    python tools/make_fixtures.py --out DIR  # writes elsewhere, to compare

Arrays of a file, with P prompt tokens, N = 200 continuation tokens, T = P + N - 1 positions:

    messages, tools     JSON text of the conversation and its tools (``null`` for none)
    text, tokens        the rendered prompt and its int32 ids [P]
    continuation        int32 [N], greedy tokens of MLX-LM; end-of-turn tokens don't end it
    ids                 int32 [64], vocabulary ids whose logits are kept at every position
    versions            JSON text: the version of every engine used
    tail_positions      int32 [8], positions whose whole rows are kept: the prompt's last eight

and for each peer, ``mlx_`` and ``transformers_``, over prompt and continuation:

    slice       float32 [T, 64], logits of ``ids``
    tail        float32 [8, V], whole rows at ``tail_positions``
    argmax      int32 [T]
    top         float32 [T], the largest logit
    logsumexp   float32 [T], over the whole vocabulary, so that every logit has a part in it
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import transformers
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.peers import mlx_greedy, mlx_logits  # noqa: E402

MODEL = ROOT / "lily" / "models" / "demo"
CONTINUATION = 200
TAIL = 8
KEPT_IDS = 64
SYSTEM = {"role": "system", "content": "You are Lily, a tiny story model."}


def turns(*contents: str) -> list[dict[str, str]]:
    """Alternating user and assistant messages."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def function(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """A tool in OpenAI's form; ``parameters`` maps each name to its JSON type."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


# Chosen among like prompts for their margins: over the whole sequence the best two logits of a
# greedy step are at least 5e-3 apart, and the last expert chosen and the first left out 2e-5 in
# router logits, so that rounding in float32 can't decide a comparison.
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "story": {
        "messages": [
            SYSTEM,
            *turns(
                "What sound does a frog make?",
                "A frog says croak.",
                "What month comes after January?",
                "February comes after January.",
                "Tell me a story about a snail and a pony.",
            ),
        ],
        "tools": None,
    },
    "addition": {
        "messages": turns(
            "What is 5 plus 2?",
            "5 + 2 = 7.",
            "Count to 4.",
            "1, 2, 3, 4.",
            "What is 2 + 4?",
            "2 + 4 = 6.",
            "What is 6 + 5?",
        ),
        "tools": None,
    },
    "tool_call": {
        "messages": turns("How is the weather in Paris?"),
        "tools": [function("get_weather", "Get the weather in a place.", place="string")],
    },
}


def dequantized_state(model_dir: Path) -> dict[str, torch.Tensor]:
    """The checkpoint in float32 under the names of transformers' text model."""
    config = json.loads((model_dir / "config.json").read_text())["quantization"]
    stored = mx.load(str(model_dir / "model.safetensors"))
    dense: dict[str, np.ndarray] = {}
    for name, value in stored.items():
        path = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        matrix = value
        if f"{path}.scales" in stored:
            settings = config.get(path, config)
            # float32 scales make mx.dequantize evaluate in float32; bfloat16 ones would round.
            scales, biases = (stored[f"{path}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            matrix = mx.dequantize(value, scales, biases, group_size=settings["group_size"], bits=settings["bits"])
        dense[name.removeprefix("language_model.")] = np.array(matrix.astype(mx.float32))
    return {name: torch.from_numpy(array) for name, array in hugging_face_layout(dense).items()}


def hugging_face_layout(dense: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Zero-centred norms, conv1d [C, 1, taps], gate and up projections of the experts fused."""
    state: dict[str, np.ndarray] = {}
    for name, value in dense.items():
        if re.search(r"(layernorm|model\.norm|q_norm|k_norm)\.weight$", name):
            # 1 + w is a bfloat16 near 1, so taking the 1 off again is exact in float32.
            state[name] = value - np.float32(1)
        elif name.endswith("conv1d.weight"):
            state[name] = np.ascontiguousarray(value.transpose(0, 2, 1))
        elif name.endswith("switch_mlp.gate_proj.weight"):
            up = dense[name.replace("gate_proj", "up_proj")]
            fused = name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
            state[fused] = np.concatenate([value, up], axis=1)
        elif name.endswith("switch_mlp.down_proj.weight"):
            down = name.replace("switch_mlp.down_proj.weight", "experts.down_proj")
            state[down] = value
        elif not name.endswith("switch_mlp.up_proj.weight"):
            state[name] = value
    return state


def transformers_model(model_dir: Path) -> Qwen3_5MoeForCausalLM:
    """transformers' model in float32 on the dequantized weights."""
    settings = json.loads((model_dir / "config.json").read_text())["text_config"]
    settings.pop("dtype")
    config = Qwen3_5MoeTextConfig(**settings, attn_implementation="eager", dtype="float32")
    model = Qwen3_5MoeForCausalLM(config).float().eval()
    model.load_state_dict(dequantized_state(model_dir), strict=True)
    return model


def kept(peer: str, rows: np.ndarray, ids: np.ndarray, tail: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of one peer from all its logits [T, V]."""
    exact = rows.astype(np.float64)
    top = exact.max(axis=-1)
    logsumexp = top + np.log(np.exp(exact - top[:, None]).sum(axis=-1))
    arrays = {
        "slice": rows[:, ids],
        "tail": rows[tail],
        "argmax": rows.argmax(axis=-1).astype(np.int32),
        "top": rows.max(axis=-1),
        "logsumexp": logsumexp.astype(np.float32),
    }
    return {f"{peer}_{name}": array for name, array in arrays.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write one file for each conversation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "fixtures")
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers_model(MODEL)
    versions = {name: version(name) for name in ("mlx", "mlx-lm", "torch", "transformers")}
    vocabulary = model.config.vocab_size
    ids = np.sort(np.random.default_rng(2).choice(vocabulary, KEPT_IDS, replace=False))
    for name, conversation in CONVERSATIONS.items():
        text = tokenizer.apply_chat_template(
            conversation["messages"],
            tools=conversation["tools"],
            add_generation_prompt=True,
            tokenize=False,
        )
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        continuation = mlx_greedy(MODEL, tokens, CONTINUATION)
        sequence = tokens + continuation[:-1]
        tail = np.arange(len(tokens) - TAIL, len(tokens))
        by_mlx = mlx_logits(MODEL, sequence)
        with torch.no_grad():
            by_transformers = model(torch.tensor([sequence])).logits[0].numpy()
        np.savez_compressed(
            out / f"logits_{name}.npz",
            messages=json.dumps(conversation["messages"]),
            tools=json.dumps(conversation["tools"]),
            text=text,
            tokens=np.array(tokens, dtype=np.int32),
            continuation=np.array(continuation, dtype=np.int32),
            ids=ids.astype(np.int32),
            versions=json.dumps(versions),
            tail_positions=tail.astype(np.int32),
            **kept("mlx", by_mlx, ids, tail),
            **kept("transformers", by_transformers, ids, tail),
        )
        apart = float(np.abs(by_mlx - by_transformers).max())
        same = float((by_mlx.argmax(-1) == by_transformers.argmax(-1)).mean())
        print(f"{name}: {len(tokens)} prompt tokens; MLX and transformers {apart:.1e} apart, argmax {same:.1%}")
        print(tokenizer.decode(continuation))


if __name__ == "__main__":
    main()
