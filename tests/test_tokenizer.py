"""Tokenizer: ids and bytes against the library's own decoding, special tokens, end-of-turn ids."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import lily
from lily.errors import CheckpointError, ConfigError, UsageError
from lily.tokenizer import Tokenizer

DEMO = Path(lily.__file__).parent / "models" / "demo"
IM_START, IM_END, THINK = 4001, 4002, 4024
TOKENIZER = Tokenizer.load(DEMO)
LIBRARY = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))

TEXTS = [
    "",
    "Once upon a time, there was a fox.\n\n\tIt's 42 o'clock.",
    "日本語と中文、한국어",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽",
    "e\u0301 n\u0303 x\u0323\u0307 — combining",
    "<|im_start|>user\nHi<|im_end|>\n<think>\n\n</think>\n\n<tool_call>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_and_the_library_agrees(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == LIBRARY.encode(text, add_special_tokens=False).ids
    # The tokenizer's normalizer is NFC, so that is what comes back.
    assert TOKENIZER.decode(ids) == unicodedata.normalize("NFC", text)
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special=True) == LIBRARY.decode(ids)


@settings(deadline=None)
@given(st.text(max_size=80))
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == LIBRARY.normalizer.normalize_str(text)
    assert TOKENIZER.decode(TOKENIZER.encode(text, special=False)) == (LIBRARY.normalizer.normalize_str(text))


@settings(deadline=None)
@given(st.lists(st.integers(0, 4032), max_size=40))
def test_any_ids_decode_as_the_library_decodes_them(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=False)


def test_every_byte_has_a_token() -> None:
    single = {TOKENIZER.token_bytes(token_id) for token_id in range(4033)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_special_false_reads_markers_as_characters() -> None:
    text = "<|im_start|>system<think>"
    assert TOKENIZER.encode(text)[0] == IM_START
    assert TOKENIZER.encode(text)[-1] == THINK
    plain = TOKENIZER.encode(text, special=False)
    assert max(plain) < 4000
    assert TOKENIZER.decode(plain) == text


def test_protocol_markers_are_text_even_when_flagged_special(edited: Edit) -> None:
    assert IM_END in TOKENIZER.special_ids
    assert THINK not in TOKENIZER.special_ids

    def flag(document: dict[str, Any]) -> None:
        for token in document["added_tokens"]:
            token["special"] = True

    tokenizer = Tokenizer.load(edited("tokenizer.json", flag))
    assert THINK not in tokenizer.special_ids
    assert tokenizer.decode([IM_START, THINK, IM_END], skip_special=True) == "<think>"


def test_a_lone_surrogate_is_refused_by_its_place() -> None:
    with pytest.raises(UsageError, match=r"lone surrogate \(U\+D83D\) at character 2"):
        TOKENIZER.encode("ab\ud83dc")


@pytest.mark.parametrize("token_id", [4033, 4095, -1, 2**40])
def test_an_id_without_a_token_is_refused(token_id: int) -> None:
    with pytest.raises(UsageError, match=rf"token id {token_id} has no token.*4033"):
        TOKENIZER.decode([token_id])


def test_truncation_and_padding_of_the_file_are_not_applied(edited: Edit) -> None:
    def limit(document: dict[str, Any]) -> None:
        document["truncation"] = {
            "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
        }  # fmt: skip
        document["padding"] = {
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 4000, "pad_type_id": 0, "pad_token": "<|endoftext|>",
        }  # fmt: skip

    tokenizer = Tokenizer.load(edited("tokenizer.json", limit))
    text = "one two three four five six seven"
    assert tokenizer.encode(text) == TOKENIZER.encode(text)


def test_rows_beyond_the_tokens_are_not_valid() -> None:
    mask = TOKENIZER.valid_ids(4096)
    assert mask.dtype == np.bool_
    assert mask.shape == (4096,)
    assert TOKENIZER.vocab_size == 4033 == mask.sum()
    assert mask[:4033].all()


def test_a_hole_in_the_vocabulary_is_not_valid(edited: Edit) -> None:
    unmerged = "Ā"  # the byte 0, which no merge uses

    def cut(document: dict[str, Any]) -> None:
        assert not any(unmerged in "".join(merge) for merge in document["model"]["merges"])
        hole.append(document["model"]["vocab"].pop(unmerged))
        document["added_tokens"] = []  # the library would number them from one lower

    hole: list[int] = []
    directory = edited("tokenizer.json", cut)
    (directory / "generation_config.json").unlink()
    tokenizer = Tokenizer.load(directory)
    mask = tokenizer.valid_ids(4096)
    assert tokenizer.vocab_size == 3999
    assert not mask[hole[0]]
    assert mask.sum() == 3999
    with pytest.raises(UsageError, match=f"token id {hole[0]} has no token"):
        tokenizer.token_bytes(hole[0])


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"token id 4032 is beyond .* 4032 rows"):
        TOKENIZER.valid_ids(4032)


def test_added_tokens_that_the_library_would_renumber_are_refused(edited: Edit) -> None:
    directory = edited("tokenizer.json", lambda document: document["added_tokens"].pop(5))
    with pytest.raises(CheckpointError, match=r"'<\|box_end\|>' has id 4006, but .* 4005"):
        Tokenizer.load(directory)


def test_tokens_that_only_the_tokenizer_config_declares_are_added(edited: Edit) -> None:
    declared = {
        "4024": {"content": "<think>", "special": False},
        "4033": {"content": "<|extra|>", "special": True},
        "4034": {"content": "<mark>", "special": False},
    }
    directory = edited("tokenizer_config.json", lambda document: document.update(added_tokens_decoder=declared))
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.encode("a<|extra|><mark>")[-2:] == [4033, 4034]
    assert 4033 in tokenizer.special_ids
    assert 4034 not in tokenizer.special_ids
    assert tokenizer.vocab_size == 4035


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ([1], "added_tokens_decoder is .1.; it must be an object"),
        ({"x": {"content": "<a>"}}, r"added_tokens_decoder\['x'\]"),
        ({"4033": "<a>"}, r"added_tokens_decoder\['4033'\] is \"<a>\""),
        ({"4050": {"content": "<a>"}}, "gives '<a>' the id 4050, but tokenizer.json makes it 4033"),
        ({"4025": {"content": "<think>"}}, "gives '<think>' the id 4025, but .* 4024"),
    ],
)
def test_malformed_added_tokens_are_named(edited: Edit, declared: object, said: str) -> None:
    directory = edited("tokenizer_config.json", lambda document: document.update(added_tokens_decoder=declared))
    with pytest.raises(ConfigError, match=said):
        Tokenizer.load(directory)


def test_a_missing_or_malformed_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    path = tmp_path / "tokenizer.json"
    for content in (b"", b"{", b"[]", b"{}", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer: "):
            Tokenizer.load(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json can't be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(("decoder", "named"), [(None, "none"), ({"type": "Fuse"}, "Fuse")], ids=["none", "fuse"])
def test_only_byte_level_tokenizers_are_read(edited: Edit, decoder: object, named: str) -> None:
    directory = edited("tokenizer.json", lambda document: document.update(decoder=decoder))
    with pytest.raises(CheckpointError, match=f"the decoder is {named}; only byte-level BPE"):
        Tokenizer.load(directory)


def test_a_token_outside_the_byte_alphabet_is_named(edited: Edit) -> None:
    def misspell(document: dict[str, Any]) -> None:
        vocab = document["model"]["vocab"]
        vocab["日"] = vocab.pop("Ā")

    tokenizer = Tokenizer.load(edited("tokenizer.json", misspell))
    token_id = tokenizer.token_id("日")
    assert token_id is not None
    with pytest.raises(CheckpointError, match=f"token {token_id} .'日'. is not spelled"):
        tokenizer.token_bytes(token_id)


def test_eos_comes_from_generation_config_then_config_then_tokenizer(edited: Edit) -> None:
    directory = edited("generation_config.json", lambda document: None)
    assert TOKENIZER.eos_ids(directory, 7) == (4002, 4000)
    write(directory / "generation_config.json", {"temperature": 1})
    assert TOKENIZER.eos_ids(directory, 7) == (7,)
    (directory / "generation_config.json").unlink()
    assert TOKENIZER.eos_ids(directory, (7, 8, 7)) == (7, 8)
    assert TOKENIZER.eos_ids(directory, ()) == (IM_END,)
    assert TOKENIZER.eos_ids(directory) == (IM_END,)
    write(directory / "tokenizer_config.json", {"eos_token": {"content": "<|endoftext|>"}})
    assert TOKENIZER.eos_ids(directory) == (4000,)
    write(directory / "tokenizer_config.json", {"eos_token": None})
    assert TOKENIZER.eos_ids(directory) == ()


@pytest.mark.parametrize(
    ("file", "document", "said"),
    [
        ("generation_config.json", {"eos_token_id": [4002, 4040]}, "eos_token_id is 4040, which"),
        ("tokenizer_config.json", {"eos_token": "<eos>"}, "eos_token is '<eos>', which is not"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token is 5; it must be a string"),
    ],
)
def test_an_eos_that_has_no_token_is_named(tmp_path: Path, file: str, document: object, said: str) -> None:
    write(tmp_path / file, document)
    with pytest.raises(ConfigError, match=f"{file}: {said}"):
        TOKENIZER.eos_ids(tmp_path)


Edit = Callable[[str, Callable[[dict[str, Any]], object]], Path]


@pytest.fixture
def edited(tmp_path: Path) -> Edit:
    """The demo model's text files, copied, with one of them changed."""

    def edit(file: str, change: Callable[[dict[str, Any]], object]) -> Path:
        for path in [*DEMO.glob("tokenizer*.json"), DEMO / "generation_config.json"]:
            shutil.copyfile(path, tmp_path / path.name)
        document = json.loads((tmp_path / file).read_text(encoding="utf-8"))
        change(document)
        write(tmp_path / file, document)
        return tmp_path

    return edit


def write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")
