"""Messages made fit for a template, or refused with index and field."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.errors import TemplateError
from lily.messages import normalize_messages

USER = {"role": "user", "content": "Hi"}
DEVELOPER = {"role": "developer", "content": "c"}


def system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


def call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return [USER, {"role": "assistant", "tool_calls": calls}]


def test_a_plain_conversation_is_unchanged() -> None:
    messages = [system("Be brief."), USER, {"role": "assistant", "content": "Hello."}, USER]
    assert normalize_messages(messages) == messages


def test_the_callers_messages_are_not_changed() -> None:
    messages = [USER, system("late"), *call('{"a": 1}')]
    before = copy.deepcopy(messages)
    normalize_messages(messages)
    assert messages == before


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([system("a"), system("b"), USER], "a\n\nb"),
        ([USER, system("late")], "late"),
        ([system(" a\n"), USER, system("b"), USER, DEVELOPER], "a\n\nb\n\nc"),
        ([system(""), USER, system(None)], ""),
        ([{"role": "developer", "content": "a"}, USER], "a"),
        ([system([{"type": "text", "text": "a"}]), USER], "a"),
    ],
)  # fmt: skip
def test_system_messages_become_one_that_comes_first(messages: list[Any], text: str) -> None:
    normal = normalize_messages(messages)
    assert normal[0] == {"role": "system", "content": text}
    assert [message["role"] for message in normal[1:]] == ["user"] * (len(normal) - 1)
    assert len(normal) == 1 + sum(message["role"] == "user" for message in messages)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
        ([{"text": "a"}], "a"),
    ],
)
def test_content_becomes_a_string(content: Any, text: str) -> None:
    assert normalize_messages([{"role": "user", "content": content}])[0]["content"] == text


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"city": "Ås", "n": [1, 2.5, null]}', {"city": "Ås", "n": [1, 2.5, None]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" ", {}),
        (None, {}),
    ],
)
def test_arguments_become_an_object(arguments: Any, parsed: dict[str, Any]) -> None:
    tool_call = normalize_messages(call(arguments))[1]["tool_calls"][0]
    assert tool_call == {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": parsed},
    }


def test_a_call_without_a_function_level_is_read() -> None:
    message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}
    parsed = normalize_messages([USER, message])[1]["tool_calls"]
    assert parsed == [{"name": "f", "arguments": {"a": 1}}]


def test_null_fields_are_as_if_not_there() -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": None, "reasoning_content": None}
    assert normalize_messages([USER, message])[1] == {"role": "assistant", "content": "a"}


CALLS: Any = [{"function": {"name": "f", "arguments": {}}}]
REFUSED: list[tuple[Any, str]] = [
    ([], "messages is empty"),
    ("Hi", 'messages is "Hi"; it must be a list'),
    (None, "messages is null; it must be a list"),
    ([system("a")], "no user message"),
    ([{"role": "assistant", "content": "a"}], "no user message"),
    ([USER, "Hi"], r'messages\[1\] is "Hi"; it must be an object'),
    ([{"content": "a"}], r"messages\[0\]\.role is null; it must be one of system, developer, user"),
    ([USER, {"role": "robot", "content": ""}], r'messages\[1\]\.role is "robot"'),
    ([{"role": ["user"], "content": ""}], r'messages\[0\]\.role is \["user"\]'),
    ([{"role": "user"}], r"messages\[0\]\.content is missing; a user message needs it"),
    ([USER, {"role": "tool"}], r"messages\[1\]\.content is missing; a tool message needs it"),
    ([{"role": "user", "content": 5}], r"messages\[0\]\.content is 5; it must be a string"),
    ([{"role": "user", "content": {"text": "a"}}], r"messages\[0\]\.content is \{"),
    (
        [{"role": "user", "content": ["a"]}],
        r'messages\[0\]\.content\[0\] is "a"; it must be an obj',
    ),
    (
        [USER, {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image_url"}]}],
        r'messages\[1\]\.content\[1\]\.type is "image_url"; only text is supported',
    ),
    (
        [{"role": "user", "content": [{"type": "text"}]}],
        r"content\[0\]\.text is null; it must be a s",
    ),
    (
        [USER, {"role": "assistant", "reasoning_content": 1}],
        r"messages\[1\]\.reasoning_content is 1",
    ),
    (
        [USER, {"role": "assistant", "tool_calls": "f"}],
        r'messages\[1\]\.tool_calls is "f"; it must',
    ),
    ([USER, {"role": "assistant", "tool_calls": [1]}], r"messages\[1\]\.tool_calls\[0\] is 1; it"),
    ([{**USER, "tool_calls": CALLS}], r"messages\[0\]\.tool_calls is in a user message"),
    (
        [USER, {"role": "assistant", "tool_calls": [{"function": "f"}]}],
        r'messages\[1\]\.tool_calls\[0\]\.function is "f"; it must be an object',
    ),
    (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}],
        r"messages\[1\]\.tool_calls\[0\]\.function\.name is null; it must be the name",
    ),
    (
        call('{"a": '),
        r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not JSON: Expecting value",
    ),
    (
        call("[1]"),
        r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is \[1\]; it must be an obj",
    ),
    (call(7), r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is 7; it must be an object"),
    (call("[" * 100_000), r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not JSON"),
]


@pytest.mark.parametrize(("messages", "said"), REFUSED)
def test_what_is_malformed_is_named_by_index_and_field(messages: Any, said: str) -> None:
    with pytest.raises(TemplateError, match=said) as raised:
        normalize_messages(messages)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 250


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | JSON},
    optional=dict.fromkeys(("content", "reasoning_content", "tool_calls", "name"), JSON),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(MESSAGE | JSON, max_size=4) | JSON)
def test_any_json_is_normalized_or_refused(messages: Any) -> None:
    try:
        normal = normalize_messages(messages)
    except TemplateError:
        return
    assert any(message["role"] == "user" for message in normal)
    assert all(message["role"] != "system" for message in normal[1:])
    assert all(isinstance(message["content"], str) for message in normal)
