"""Incremental detokenization: the pieces joined are the text, none with half a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lily
from lily.detokenize import Detokenizer
from lily.errors import UsageError
from lily.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(lily.__file__).parent / "models" / "demo")
IM_END, TOOL_CALL, THINK = 4002, 4014, 4024

CASES = [
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇳🇴",
    "日本語、中文、한국어、ไทย",
    "n\u0303o\u0323\u0307 q\u0303\u0323 नमस्ते",
    "𠀀𠮷 𓀀 \U0010fffd \u0000 plain",
]


class Slices:
    """A vocabulary of arbitrary byte strings: id n is the n-th of them."""

    def __init__(self, slices: list[bytes], special: frozenset[int] = frozenset()) -> None:
        self.slices = slices
        self.special_ids = special

    def token_bytes(self, token_id: int) -> bytes:
        return self.slices[token_id]


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_text_cut_inside_its_characters_comes_out_whole(text: str, width: int) -> None:
    raw = text.encode()
    slices = [raw[start : start + width] for start in range(0, len(raw), width)]
    deltas = pieces(Detokenizer(Slices(slices)), list(range(len(slices))))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("text", CASES)
def test_the_demo_vocabulary_spells_them(text: str) -> None:
    ids = TOKENIZER.encode(text)
    deltas = pieces(Detokenizer(TOKENIZER), ids)
    assert len(ids) > len(text.split())
    assert "".join(deltas) == TOKENIZER.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


@settings(deadline=None)
@given(st.data(), st.text(max_size=30))
def test_valid_text_in_any_cuts_is_never_replaced(data: st.DataObject, text: str) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=20)))
    slices = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    detokenizer = Detokenizer(Slices(slices))
    seen = ""
    for token_id, _ in enumerate(slices):
        seen += detokenizer.push(token_id)
        # Every character whose bytes are all there is shown at once, and nothing else.
        complete = b"".join(slices[: token_id + 1]).decode(errors="ignore")
        assert seen == complete
    assert detokenizer.finish() == ""
    assert seen == text


@settings(deadline=None)
@given(st.lists(st.binary(max_size=5), max_size=12))
def test_any_bytes_come_out_as_when_decoded_at_once(slices: list[bytes]) -> None:
    deltas = pieces(Detokenizer(Slices(slices)), list(range(len(slices))))
    assert "".join(deltas) == b"".join(slices).decode(errors="replace")


@settings(deadline=None)
@given(st.lists(st.integers(0, 4032), max_size=40), st.booleans())
def test_any_tokens_come_out_as_when_decoded_at_once(ids: list[int], hide: bool) -> None:
    deltas = pieces(Detokenizer(TOKENIZER, hide_special=hide), ids)
    assert "".join(deltas) == TOKENIZER.decode(ids, skip_special=hide)


def test_a_character_cut_short_by_the_end_is_replaced_once() -> None:
    detokenizer = Detokenizer(Slices([b"ok \xf0\x9f", b"\x91", b"next"]))
    assert [detokenizer.push(0), detokenizer.push(1), detokenizer.finish()] == ["ok ", "", "\ufffd"]
    assert [detokenizer.push(2), detokenizer.finish()] == ["next", ""]


def test_control_tokens_are_hidden_and_markers_are_not() -> None:
    ids = [THINK, TOOL_CALL, IM_END]
    assert "".join(pieces(Detokenizer(TOKENIZER), ids)) == "<think><tool_call>"
    shown = "".join(pieces(Detokenizer(TOKENIZER, hide_special=False), ids))
    assert shown == "<think><tool_call><|im_end|>"


def test_a_hidden_token_does_not_break_a_character() -> None:
    slices = Slices(["é".encode()[:1], b"<|im_end|>", "é".encode()[1:]], special=frozenset([1]))
    assert pieces(Detokenizer(slices), [0, 1, 2]) == ["", "", "é", ""]


def test_an_id_without_a_token_is_refused() -> None:
    with pytest.raises(UsageError, match="token id 4033 has no token"):
        Detokenizer(TOKENIZER).push(4033)
