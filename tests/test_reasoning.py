"""Thinking and answer apart, whatever the cuts, with no tag in either."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lily
from lily.chat import ChatTemplate
from lily.reasoning import Kind, Piece, ReasoningSplitter, starts_inside_thinking

DEMO = Path(lily.__file__).parent / "models" / "demo"


def split(pieces: list[str], *, inside: bool) -> list[Piece]:
    """All pieces, neighbours of one kind joined."""
    splitter = ReasoningSplitter(inside)
    found = [piece for text in pieces for piece in splitter.push(text)] + splitter.finish()
    joined: list[Piece] = []
    for piece in found:
        assert piece.text
        before = joined.pop().text if joined and joined[-1].kind == piece.kind else ""
        joined.append(Piece(piece.kind, before + piece.text))
    return joined


R: Kind = "reasoning"
C: Kind = "content"
CASES = [
    (True, "I add.\n</think>\n\nFour.", [(R, "I add."), (C, "Four.")]),
    (True, "I add.</think>Four.", [(R, "I add."), (C, "Four.")]),
    (True, "\n</think>\n\nFour.", [(C, "Four.")]),
    (True, "</think>\n\nFour.", [(C, "Four.")]),
    (True, " \n\n</think>\n\nFour.", [(C, "Four.")]),
    (True, "still thinking", [(R, "still thinking")]),
    (True, "still </thin", [(R, "still </thin")]),
    (True, "still\n", [(R, "still\n")]),
    (True, "", []),
    (True, "\n\n", []),
    (True, "<think>\nagain\n</think>\n\nA", [(R, "again"), (C, "A")]),
    (True, "the tag <think> opens\n</think>\n\nA", [(R, "the tag <think> opens"), (C, "A")]),
    (True, "a\n\n b\n\n</think>\n\n\nA", [(R, "a\n\n b\n"), (C, "\nA")]),
    (True, "a</think>\n<tool_call>\n", [(R, "a"), (C, "<tool_call>\n")]),
    (True, "a < b </ c </thinks>\n</think>\n\n1 < 2", [(R, "a < b </ c </thinks>"), (C, "1 < 2")]),
    (False, "Four.", [(C, "Four.")]),
    (False, "\n\nFour.\n", [(C, "\n\nFour.\n")]),
    (False, "<think>\n\n</think>\n\nFour.", [(C, "Four.")]),
    (False, "<think></think>Four.", [(C, "Four.")]),
    (False, "<think>\nI add.\n</think>\n\nFour.", [(R, "I add."), (C, "Four.")]),
    (False, "</think>\n\nFour.", [(C, "Four.")]),
    (False, "A<think>t</think>B", [(C, "A"), (R, "t"), (C, "B")]),
    (False, "1 <2 <thin", [(C, "1 <2 <thin")]),
]


@pytest.mark.parametrize(("inside", "text", "expected"), CASES)
def test_every_cut_into_three_gives_the_same(inside: bool, text: str, expected: list[tuple[str, str]]) -> None:
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [text[:first], text[first:second], text[second:]]
            assert split(pieces, inside=inside) == expected
    assert split(list(text), inside=inside) == expected


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "<", "/", "</th"]), max_size=12),
    st.data(),
    st.booleans(),
)
def test_cuts_never_matter(parts: list[str], data: st.DataObject, inside: bool) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = split([text], inside=inside)
    assert split(pieces, inside=inside) == whole
    assert all("<think>" not in piece.text for piece in whole if piece.kind == C)
    assert all("</think>" not in piece.text for piece in whole)
    assert all(piece.text.strip() for piece in whole if piece.kind == R)


@settings(deadline=None)
@given(st.text(max_size=20), st.text(max_size=20), st.booleans())
def test_a_rendered_turn_comes_apart_again(thought: str, answer: str, inside: bool) -> None:
    """The inverse of the template's ``<think>⏎t⏎</think>⏎⏎text``."""
    if "think>" in thought + answer:
        return
    text = f"{'' if inside else '<think>'}\n{thought}\n</think>\n\n{answer}"
    expected = [Piece(R, thought)] if thought.strip() else []
    expected += [Piece(C, answer)] if answer else []
    assert split([text], inside=inside) == expected


def test_text_that_can_be_no_tag_is_not_held() -> None:
    splitter = ReasoningSplitter(True)
    assert splitter.push("thought") == [Piece(R, "thought")]
    assert splitter.push(" a <") == [Piece(R, " a ")]
    assert splitter.push("b") == [Piece(R, "<b")]
    assert splitter.push("\n</think>\n\nyes") == [Piece(C, "yes")]
    assert splitter.push(" no</t") == [Piece(C, " no")]
    assert splitter.finish() == [Piece(C, "</t")]


def test_one_push_may_hold_both_kinds() -> None:
    pieces = ReasoningSplitter(True).push("t\n</think>\n\nanswer")
    assert pieces == [Piece(R, "t"), Piece(C, "answer")]


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\nso far", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nwhat is <think>\n<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\nA<|im_end|>\n", False),
        ("<|im_start|>assistant\n<think><|im_end|>\n<|im_start|>user\n<think>", False),
        ("a plain text", False),
        ("a plain text <think>\n", True),
        ("", False),
    ],
)
def test_the_prompts_tail_says_where_generation_starts(prompt: str, inside: bool) -> None:
    assert starts_inside_thinking(prompt) is inside


@pytest.mark.parametrize(("thinking", "inside"), [(None, True), (True, True), (False, False)])
def test_the_demo_templates_prompts_say_so_too(thinking: bool | None, inside: bool) -> None:
    template = ChatTemplate.load(DEMO)
    assert template is not None
    messages = [{"role": "user", "content": "<think> or </think>?"}]
    assert starts_inside_thinking(template.render(messages, enable_thinking=thinking)) is inside
