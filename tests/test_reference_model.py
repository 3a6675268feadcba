"""The whole oracle against MLX-LM and transformers, through the fixtures of ``tools/make_fixtures.py``.

Both ran in float32, so what separates them from float64 is their own rounding: 0.9e-5 to 3.1e-5 as measured, on
logits of standard deviation 4. The tolerance of 1e-3 is what the model specification asks of any float32 engine (§9).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lily.chat import ChatTemplate
from lily.errors import CheckpointError, ConfigError
from lily.reference import ReferenceModel
from lily.reference.model import AttentionState, DeltaNetState
from lily.tokenizer import Tokenizer
from tests.checkpoints import DEMO, huggingface_tensors, mlx_tensors, random_model, save, tiny_config
from tests.fixtures import CONVERSATIONS, PEERS, Fixture

TOLERANCE = 1e-3
# Two orders of the same float64 sums, about 1e-12 apart in logits.
REORDERED: dict[str, Any] = {"rtol": 0.0, "atol": 1e-9}


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return ReferenceModel.load(DEMO)


@pytest.fixture(scope="module", params=CONVERSATIONS)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return Fixture.load(request.param)


@pytest.fixture(scope="module")
def logits(model: ReferenceModel, fixture: Fixture) -> NDArray[np.float64]:
    return model.forward(fixture.sequence)


@pytest.mark.parametrize("peer", PEERS)
def test_logits_equal_the_peers(fixture: Fixture, logits: NDArray[np.float64], peer: str) -> None:
    assert fixture.distance(peer, logits) < TOLERANCE
    np.testing.assert_array_equal(logits.argmax(axis=-1), fixture.argmax(peer))


def test_greedy_continuation_equals_mlx(fixture: Fixture, logits: NDArray[np.float64]) -> None:
    """Each of 200 tokens is the argmax after all before it, so by induction generation gives the same."""
    np.testing.assert_array_equal(logits[len(fixture.tokens) - 1 :].argmax(axis=-1), fixture.continuation)


def test_prompt_is_rendered_and_encoded_as_by_transformers(fixture: Fixture) -> None:
    template = ChatTemplate.load(DEMO)
    assert template is not None
    text = template.render(fixture.messages, tools=fixture.tools)
    assert text == fixture.text
    assert Tokenizer.load(DEMO).encode(text) == list(fixture.tokens)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_equal_the_whole(model: ReferenceModel, chunk: int) -> None:
    tokens = Fixture.load("story").tokens[: 3 if chunk == 1 else 70]
    state = model.new_state()
    parts = [model.forward(tokens[at : at + chunk], state) for at in range(0, len(tokens), chunk)]
    np.testing.assert_allclose(np.concatenate(parts), model.forward(tokens), **REORDERED)
    assert state.position == len(tokens)
    kinds = [DeltaNetState, DeltaNetState, DeltaNetState, AttentionState] * 2
    assert [type(layer) for layer in state.layers] == kinds


def test_a_layer_can_be_run_on_its_own(model: ReferenceModel) -> None:
    stream = list(model.residual_stream([1, 2, 3]))
    assert [x.shape for x in stream] == [(3, 256)] * 9
    alone = model.layer(3, stream[3], model.new_state().layers[3], 0)
    np.testing.assert_array_equal(alone, stream[4])


def test_every_layout_gives_the_same_logits(tmp_path: Path) -> None:
    """The values of the tiny model are exact in every dtype, so nothing but order of evaluation may differ."""
    config, plain = tiny_config(), tiny_config(quantization=None)
    tiny = random_model(config)
    layouts = {
        "mlx": (config, mlx_tensors(tiny), 1),
        "mlx_dense": (plain, mlx_tensors(tiny, quantized=lambda path: False), 2),
        "hugging_face": (plain, huggingface_tensors(tiny), 3),
    }
    tokens = [5, 95, 0, 17, 17, 3]
    read = {
        name: ReferenceModel.load(save(tmp_path / name, settings, tensors, shards=shards)).forward(tokens)
        for name, (settings, tensors, shards) in layouts.items()
    }
    assert np.std(read["mlx"]) > 0.1
    np.testing.assert_allclose(read["mlx_dense"], read["mlx"], **REORDERED)
    np.testing.assert_allclose(read["hugging_face"], read["mlx"], **REORDERED)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    config = tiny_config(quantization=None)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ReferenceModel.load(tmp_path)
    tensors = huggingface_tensors(random_model(config))
    save(tmp_path, config, {name: tensor for name, tensor in tensors.items() if "o_proj" not in name})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj"):
        ReferenceModel.load(tmp_path).forward([1])
    del config["text_config"]["head_dim"]
    with pytest.raises(ConfigError, match="head_dim"):
        ReferenceModel(config, {})
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        ReferenceModel.load(tmp_path)
