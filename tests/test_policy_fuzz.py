"""Whatever a policy file holds, it loads or its mistakes are named; nothing else comes out."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lily.errors import PolicyError
from lily.ops import OPS
from lily.policy import SETTINGS, Policy, available
from tests.variants import registry

CPU = registry("cpu")

WORDS = [
    *("version", "name", "extends", "match", "execution", "kernels", "when", "use", "with", "phase", "rows", "context"),
    *("decode", "prefill", "cpu", "metal", "gemv", "gemm", "direct", "blockwise", "block", "tile_rows", "host"),
    *("< 8", ">= 8", "8..16", "16..8", "1", "apple.yaml", "x.yaml", ".", "", "\0", "on", "<<", "a\nb", "\x85"),
    *OPS,
    *SETTINGS,
]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=6)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=20,
)
conditions = st.dictionaries(
    st.sampled_from(["phase", "rows", "hidden", "bits", "in_features"]),
    st.integers(-1, 9)
    | st.sampled_from(["< 8", ">= 8", "8..16", "<= 1", "decode"])
    | st.lists(st.integers(0, 9), max_size=2),
    max_size=3,
)
rules = st.fixed_dictionaries(
    {"use": st.sampled_from(["rows", "gemv", "gemm", "fused", "no"])},
    optional={
        "when": conditions,
        "with": st.dictionaries(st.sampled_from(["tile_rows", "block"]), scalars, max_size=2),
    },
)
policies = st.fixed_dictionaries(
    {"version": st.just(1), "extends": st.sampled_from(["cpu", "apple"])},
    optional={
        "kernels": st.dictionaries(
            st.sampled_from(["embed", "linear", "logits"]), st.lists(rules, max_size=6), max_size=3
        ),
        "execution": st.dictionaries(st.sampled_from([*SETTINGS]), st.integers(0, 5) | st.just("serial"), max_size=3),
    },
)


def load_or_explain(folder: Path, content: bytes) -> None:
    """Loads, or fails with a PolicyError whose every line names a file and a line that exists."""
    path = folder / "x.yaml"
    path.write_bytes(content)
    try:
        Policy.load(path, CPU)
    except PolicyError as error:
        for line in str(error).split("\n"):
            assert re.fullmatch(r".*\.yaml:\d+: .+", line), line
            assert line.isprintable(), line


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(document=values)
def test_random_documents(tmp_path: Path, document: object) -> None:
    load_or_explain(tmp_path, yaml.safe_dump(document, allow_unicode=True).encode())


@FUZZ
@given(document=st.dictionaries(st.sampled_from(WORDS[:6]), values, max_size=6))
def test_random_policies(tmp_path: Path, document: dict[str, object]) -> None:
    load_or_explain(tmp_path, yaml.safe_dump({"version": 1, **document}).encode())


@FUZZ
@given(document=policies)
def test_random_rules(tmp_path: Path, document: dict[str, object]) -> None:
    load_or_explain(tmp_path, yaml.safe_dump(document, sort_keys=False).encode())


@FUZZ
@given(data=st.data())
def test_random_edits_of_a_shipped_policy(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(available(CPU)["m5"].read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 12))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([word.encode() for word in WORDS])
        )
    load_or_explain(tmp_path, bytes(content))


@FUZZ
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_random_bytes(tmp_path: Path, content: bytes) -> None:
    load_or_explain(tmp_path, content)
