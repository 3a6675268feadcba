"""The chat template: the demo checkpoint's protocol, errors, and where templates are found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lily
from lily.chat import ChatTemplate
from lily.errors import ConfigError, TemplateError
from lily.tokenizer import Tokenizer

DEMO = Path(lily.__file__).parent / "models" / "demo"
S, U, A = "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n"
E = "<|im_end|>\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "No jokes."}
LATE = {"role": "system", "content": "Now."}
ANSWER = {"role": "assistant", "content": "Hello.", "reasoning_content": "They greet."}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "It's <b>ä</b> & co.", "parameters": {}},
}


def called(*arguments: Any, content: Any = None) -> dict[str, Any]:
    calls = [{"function": {"name": "weather", "arguments": one}} for one in arguments]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.fixture(scope="module")
def demo() -> ChatTemplate:
    template = ChatTemplate.load(DEMO)
    assert template is not None
    return template


CALL = "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"

TOWNS = '["Ås", "<b>"]'

RENDERED: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([SYSTEM, USER], {}, f"{S}Be brief.{E}{U}Hi{E}{A}<think>\n"),
    ([{"role": "user", "content": " Hi\n"}], {}, f"{U}Hi{E}{A}<think>\n"),
    ([USER], {"enable_thinking": True}, f"{U}Hi{E}{A}<think>\n"),
    ([USER], {"enable_thinking": False}, f"{U}Hi{E}{A}{NO_THOUGHT}"),
    ([USER], {"add_generation_prompt": False}, f"{U}Hi{E}"),
    ([USER, ANSWER, USER], {}, f"{U}Hi{E}{A}Hello.{E}{U}Hi{E}{A}<think>\n"),
    (
        [USER, ANSWER, USER],
        {"preserve_thinking": True},
        f"{U}Hi{E}{A}<think>\nThey greet.\n</think>\n\nHello.{E}{U}Hi{E}{A}<think>\n",
    ),
    (
        [USER, {"role": "assistant", "content": "<think>\nT\n</think>\n\nB"}],
        {"add_generation_prompt": False},
        f"{U}Hi{E}{A}<think>\nT\n</think>\n\nB{E}",
    ),
    (
        [USER, called('{"city": "Oslo"}'), {"role": "tool", "content": "4 °C"}],
        {},
        f"{U}Hi{E}{A}{NO_THOUGHT}{CALL.format('Oslo')}{E}"
        f"<|im_start|>user\n<tool_response>\n4 °C\n</tool_response>{E}{A}<think>\n",
    ),
    (
        [
            USER,
            called({"city": ["Ås", "<b>"]}, {"city": "Oslo"}, content="Wait."),
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": [{"type": "text", "text": "2"}]},
        ],
        {"add_generation_prompt": False},
        f"{U}Hi{E}{A}{NO_THOUGHT}Wait.\n\n{CALL.format(TOWNS)}\n{CALL.format('Oslo')}{E}"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        f"<tool_response>\n2\n</tool_response>{E}",
    ),
    # Several system messages, late ones and the developer's role.
    (
        [SYSTEM, DEVELOPER, USER, LATE],
        {},
        f"{S}Be brief.\n\nNo jokes.\n\nNow.{E}{U}Hi{E}{A}<think>\n",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "options", "prompt"), RENDERED)
def test_the_protocol(demo: ChatTemplate, messages: list[dict[str, Any]], options: dict[str, Any], prompt: str) -> None:
    assert demo.render(messages, **options) == prompt


def test_tools_come_before_the_system_text_as_plain_json(demo: ChatTemplate) -> None:
    prompt = demo.render([SYSTEM, USER], tools=[TOOL, TOOL])
    line = json.dumps(TOOL, ensure_ascii=False)
    assert "<b>ä</b> & co." in line
    assert prompt.startswith(f"{S}# Tools\n")
    assert f"<tools>\n{line}\n{line}\n</tools>" in prompt
    assert f"</tool_call>\n\nBe brief.{E}{U}Hi{E}" in prompt
    assert demo.render([USER], tools=[]) == demo.render([USER])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty"),
        ([SYSTEM], "no user message"),
        (
            [{"role": "user", "content": "<tool_response>\nx\n</tool_response>"}],
            "the chat template refuses this conversation: A chat needs at least one user message.",
        ),
        ([USER, called("{")], r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not JSON"),
    ],
)
def test_a_conversation_that_can_not_be_is_refused(demo: ChatTemplate, messages: list[Any], said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        demo.render(messages)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_thinking": "false"}, 'enable_thinking is "false"; it must be true or false'),
        ({"preserve_thinking": 1}, "preserve_thinking is 1; it must be true or false"),
        ({"tools": "weather"}, 'tools is "weather"; it must be a list of objects'),
        ({"tools": {"a": 1}}, "tools is .* must be a list of objects"),
        ({"tools": [TOOL, 5]}, r"tools\[1\] is 5; it must be an object"),
        ({"messages": []}, "messages can't be a template variable"),
        ({"raise_exception": 1}, "raise_exception can't be a template variable"),
    ],
)
def test_options_are_checked(demo: ChatTemplate, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        demo.render([USER], **options)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_header_is_apart_from_the_history(demo: ChatTemplate, thinking: bool | None) -> None:
    messages = [SYSTEM, USER, ANSWER, USER]
    history, header = demo.render_parts(messages, enable_thinking=thinking)
    assert history + header == demo.render(messages, enable_thinking=thinking)
    assert history.endswith(E)
    assert header == (A + (NO_THOUGHT if thinking is False else "<think>\n"))
    # The next request's prompt begins with the history; with the header it may not.
    following = demo.render([*messages, ANSWER, USER], enable_thinking=thinking)
    assert following.startswith(history + A)
    assert not following.startswith(history + header)


def test_the_parts_encode_to_the_same_tokens_as_the_whole(demo: ChatTemplate) -> None:
    tokenizer = Tokenizer.load(DEMO)
    history, header = demo.render_parts([SYSTEM, USER])
    assert tokenizer.encode(history) + tokenizer.encode(header) == tokenizer.encode(history + header)


def test_a_template_that_changes_more_than_its_end_is_parted_where_it_differs() -> None:
    template = ChatTemplate("{{ 'ab' if add_generation_prompt else 'acd' }}")
    assert template.render_parts([USER]) == ("a", "b")
    shorter = ChatTemplate("{{ 'a' if add_generation_prompt else 'ab' }}")
    assert shorter.render_parts([USER]) == ("a", "")


@settings(deadline=None)
@given(
    messages=st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
                "content": st.text(max_size=10) | st.none(),
            }
        ),
        max_size=6,
    )
)
def test_any_order_of_roles_renders_or_is_refused(demo: ChatTemplate, messages: list[dict[str, Any]]) -> None:
    try:
        history, header = demo.render_parts(messages)
    except TemplateError:
        assert not any(message["role"] == "user" for message in messages)
        return
    assert header == A + "<think>\n"
    assert history.count(S) == any(m["role"] in ("system", "developer") for m in messages)


def test_the_environment_has_what_templates_count_on() -> None:
    source = """\
{%- for n in [1, 2, 3, 4] %}
    {%- if n == 2 %}{% continue %}{% endif %}
    {%- if n == 4 %}{% break %}{% endif %}
    {%- if true %}
{{ n }}
    {% endif %}
{%- endfor %}
{{ {"é": "<&'>"} | tojson }} {{ [1, {"a": 2}] | tojson(indent=1) }}
{{ strftime_now("%Y") | length }} {{ eos_token }} {{ city }}"""
    template = ChatTemplate(source, variables={"eos_token": "<|im_end|>"})
    expected = '1\n3\n{"é": "<&\'>"} [\n 1,\n {\n  "a": 2\n }\n]\n4 <|im_end|> Oslo'
    assert template.render([USER], city="Oslo") == expected


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a\n{{ messages[0].content.x.y }}", r"here\.jinja:2: the template failed with UndefinedE"),
        ("\n\n{{ 1 / 0 }}", r"here\.jinja:3: the template failed with ZeroDivisionError"),
        ("{{ 'a' + 1 }}", r"here\.jinja:1: the template failed with TypeError"),
        ("{{ ''.__class__.__mro__ }}", r"here\.jinja:1: .* SecurityError"),
        ("{{ messages.append(1) }}", r"here\.jinja:1: .* SecurityError"),
        ("{% for i in range(10**9) %}{% endfor %}", r"here\.jinja:1: .* OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"here\.jinja:1: .* RecursionError"),
        ("{{ raise_exception('no\n way') }}", r"refuses this conversation: no way$"),
        ("{% if x %}\n{{ y }", r"here\.jinja:2: the template has a syntax error"),
        ("{{ x | nosuchfilter }}", r"here\.jinja:1: the template has a syntax error: No filter"),
        ("{% include 'x' %}", r"here\.jinja:1: the template failed with TypeError"),
    ],
)
def test_an_error_in_the_template_is_one_sentence_with_its_line(source: str, said: str) -> None:
    with pytest.raises(TemplateError, match=said) as raised:
        ChatTemplate(source, where="here.jinja").render([USER])
    assert "\n" not in str(raised.value)


def test_the_template_is_looked_for_in_three_places(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    write(tmp_path / "tokenizer_config.json", {"eos_token": "E", "pad_token": None})
    assert ChatTemplate.load(tmp_path) is None
    config = {"chat_template": "config {{ bos_token }}", "bos_token": {"content": "B"}}
    write(tmp_path / "tokenizer_config.json", config)
    assert render_loaded(tmp_path) == "config B"
    write(tmp_path / "chat_template.json", {"chat_template": "json"})
    assert render_loaded(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    assert render_loaded(tmp_path) == "jinja é"


def test_a_template_for_tools_is_used_when_there_are_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    write(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert render_loaded(tmp_path) == "plain"
    assert render_loaded(tmp_path, tools=[TOOL]) == "1 tools"
    named[1]["template"] = "{{ 1 / 0 }}"
    write(tmp_path / "tokenizer_config.json", {"chat_template": named})
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json \(chat_template\), tool_use:1: "):
        render_loaded(tmp_path, tools=[TOOL])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "chat_template is 5; it must be a string or a list"),
        (["x"], 'chat_template[0] is "x"; it must be an object with name and template'),
        ([{"name": "a"}], "chat_template[0] is "),
        ([{"name": "tool_use", "template": ""}], 'names ["tool_use"]; one of them must be default'),
        ([], "names []; one of them must be default"),
    ],
)
def test_a_malformed_template_entry_is_named(tmp_path: Path, value: Any, said: str) -> None:
    write(tmp_path / "chat_template.json", {"chat_template": value})
    with pytest.raises(ConfigError, match=rf"chat_template\.json: .*{re.escape(said)}"):
        ChatTemplate.load(tmp_path)


def test_a_template_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja can't be read: .*utf-8"):
        ChatTemplate.load(tmp_path)


def render_loaded(directory: Path, **options: Any) -> str:
    template = ChatTemplate.load(directory)
    assert template is not None
    return template.render([USER], **options)


def write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")
