"""Live comparison with MLX-LM, where the ``peers`` extra is installed.

The float64 oracle and the float32 engine against MLX in float32 on the same 4-bit file: 2e-5 to 5e-5 apart as measured;
the tolerance is that of the model specification (§9).
"""

from __future__ import annotations

import numpy as np
import pytest

import lily
from lily.reference import ReferenceModel
from tests.checkpoints import DEMO
from tests.fixtures import CONVERSATIONS, Fixture
from tests.peers import mlx_greedy, mlx_logits

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'lily[peers]'")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'lily[peers]'")

TOLERANCE = 1e-3
POSITIONS = 60


@pytest.fixture(scope="module", params=CONVERSATIONS)
def tokens(request: pytest.FixtureRequest) -> list[int]:
    return [int(token) for token in Fixture.load(request.param).tokens[-POSITIONS:]]


def test_reference_equals_mlx(tokens: list[int]) -> None:
    ours, theirs = ReferenceModel.load(DEMO).forward(tokens), mlx_logits(DEMO, tokens)
    assert np.abs(ours - theirs).max() < TOLERANCE
    np.testing.assert_array_equal(ours.argmax(axis=-1), theirs.argmax(axis=-1))


def test_mlx_still_gives_the_recorded_continuation() -> None:
    """Prefill with a cache and single steps: another path through MLX than that of the fixture's logits."""
    fixture = Fixture.load("tool_call")
    assert mlx_greedy(DEMO, list(map(int, fixture.tokens)), 20) == list(fixture.continuation[:20])


def test_the_engine_equals_mlx(tokens: list[int]) -> None:
    engine = lily.load(max_context=256)
    ours, theirs = engine.logits(tokens), mlx_logits(DEMO, tokens)
    engine.close()
    assert np.abs(ours - theirs).max() < TOLERANCE
    np.testing.assert_array_equal(ours.argmax(axis=-1), theirs.argmax(axis=-1))
