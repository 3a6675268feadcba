"""The messages of a conversation: their types, and the one form that chat templates accept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from lily.errors import TemplateError
from lily.json_file import shown

__all__ = ["FunctionCall", "Message", "TextPart", "ToolCall", "normalize_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool")


class TextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(TypedDict):
    """The function a tool call names; arguments as an object, or as JSON text of one."""

    name: str
    arguments: Mapping[str, Any] | str


class ToolCall(TypedDict, total=False):
    """A call the assistant made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict, total=False):
    """One message of a conversation, as in the chat-completions protocol."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Sequence[TextPart] | None
    reasoning_content: str | None
    tool_calls: Sequence[ToolCall] | None
    tool_call_id: str
    name: str


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form that templates of this family accept; the caller's are not changed.

    ``developer`` becomes ``system``; system messages beyond the first, or late, join the first, in
    order, a blank line between them; content becomes a string (text parts joined, ``None`` empty);
    tool-call arguments become an object.

    Raises:
        TemplateError: there is no message or none by the user, or a field is missing or has a wrong
            type; the message names the index and the field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TemplateError(f"messages is {shown(messages)}; it must be a list of objects")
    if not messages:
        raise TemplateError("messages is empty; a conversation needs at least one user message")
    normal = [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not any(message["role"] == "user" for message in normal):
        raise TemplateError("messages holds no user message; a conversation needs at least one")
    system = [message for message in normal if message["role"] == "system"]
    if not system or (len(system) == 1 and normal[0] is system[0]):
        return normal
    texts = [text for message in system if (text := message["content"].strip())]
    return [
        {**system[0], "content": "\n\n".join(texts)},
        *(message for message in normal if message["role"] != "system"),
    ]


def _normalize(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TemplateError(f"{at} is {shown(message)}; it must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise TemplateError(f"{at}.role is {shown(role)}; it must be one of {', '.join(ROLES)}")
    if "content" not in message and role != "assistant":
        raise TemplateError(f"{at}.content is missing; a {role} message needs it")
    normal = dict(message)
    normal["role"] = "system" if role == "developer" else role
    normal["content"] = _text(message.get("content"), f"{at}.content")
    if (thought := normal.pop("reasoning_content", None)) is not None:
        if not isinstance(thought, str):
            raise TemplateError(f"{at}.reasoning_content is {shown(thought)}; it must be a string")
        normal["reasoning_content"] = thought
    if (calls := normal.pop("tool_calls", None)) is not None:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise TemplateError(f"{at}.tool_calls is {shown(calls)}; it must be a list of objects")
        if calls and role != "assistant":
            raise TemplateError(f"{at}.tool_calls is in a {role} message; only an assistant message may have it")
        normal["tool_calls"] = [_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return normal


def _text(content: object, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TemplateError(f"{at} is {shown(content)}; it must be a string, a list of text parts, or null")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise TemplateError(f"{at}[{index}] is {shown(part)}; it must be an object with type and text")
        if part.get("type", "text") != "text":
            raise TemplateError(f"{at}[{index}].type is {shown(part['type'])}; only text is supported")
        if not isinstance(part.get("text"), str):
            raise TemplateError(f"{at}[{index}].text is {shown(part.get('text'))}; it must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: object, at: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise TemplateError(f"{at} is {shown(call)}; it must be an object with a function")
    function = call.get("function", call)
    if function is not call:
        at += ".function"
    if not isinstance(function, Mapping):
        raise TemplateError(f"{at} is {shown(function)}; it must be an object with name and arguments")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise TemplateError(f"{at}.name is {shown(name)}; it must be the name of a function")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"{at}.arguments is not JSON: {error}") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise TemplateError(f"{at}.arguments is {shown(arguments)}; it must be an object, or JSON text of one")
    parsed = {**function, "arguments": dict(arguments)}
    return parsed if function is call else {**call, "function": parsed}
