"""The tokenizer of random models, through the engine's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lily.byte_tokenizer import END_OF_TEXT, MIN_VOCAB, byte_tokenizer, tokenizer_config
from lily.checkpoint_writer import json_bytes
from lily.errors import UsageError
from lily.tokenizer import Tokenizer


def load(directory: Path, vocab_size: int) -> Tokenizer:
    (directory / "tokenizer.json").write_text(byte_tokenizer(vocab_size).to_str())
    (directory / "tokenizer_config.json").write_bytes(json_bytes(tokenizer_config()))
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("tokenizer"), 100_000)


@given(st.text())
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_pairs_of_ascii_are_one_token(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("abcdefgh")) == 4
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("ab cd")] == [b"ab", b" c", b"d"]


@pytest.mark.parametrize(("vocab_size", "tokens"), [(257, 257), (300, 300), (9282, 9282), (248_320, 9282)])
def test_all_ids_up_to_the_end_of_text_have_a_token(tmp_path: Path, vocab_size: int, tokens: int) -> None:
    tokenizer = load(tmp_path, vocab_size)
    assert tokenizer.vocab_size == tokens
    assert tokenizer.valid_ids(vocab_size).sum() == tokens
    assert len({tokenizer.token_bytes(i) for i in range(tokens)}) == tokens
    assert tokenizer.token_id(END_OF_TEXT) == tokens - 1
    assert tokenizer.special_ids == {tokens - 1}
    assert tokenizer.eos_ids(tmp_path) == (tokens - 1,)


def test_a_vocabulary_without_room_for_all_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match=f"a vocabulary of 256 is too small.*at least {MIN_VOCAB} tokens"):
        byte_tokenizer(256)
