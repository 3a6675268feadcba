"""The checkpoint's chat template: messages to the prompt the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lily.errors import ConfigError, TemplateError
from lily.json_file import read_json_object, shown
from lily.messages import Message, normalize_messages
from lily.tokenizer import TOKENIZER_CONFIG, special_token_text

__all__ = ["ChatTemplate", "Message", "normalize_messages"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
RESERVED = frozenset(["messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"])
SWITCHES = ("enable_thinking", "preserve_thinking")


class ChatTemplate:
    """A checkpoint's Jinja template, compiled once, run in a sandbox.

    Args:
        source: the template's text.
        where: the file it comes from, for messages.
        tool_source: another template to use when tools are given.
        variables: text of special tokens the template may name (``bos_token`` and the like).

    Raises:
        TemplateError: a syntax error, with file and line.
    """

    def __init__(
        self,
        source: str,
        *,
        where: str = "chat template",
        tool_source: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._variables = dict(variables or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = _compile(environment, source, where)
        self._tool_template = (
            self._template if tool_source is None else _compile(environment, tool_source, f"{where}, tool_use")
        )

    @classmethod
    def load(cls, model_dir: str | Path) -> ChatTemplate | None:
        """The template of a checkpoint, or ``None`` if it has none.

        Looked for in ``chat_template.jinja``, ``chat_template.json`` and ``tokenizer_config.json``,
        in this order. The JSON files hold one template, or a list of named ones: ``default``, and
        ``tool_use`` for requests with tools.

        Raises:
            ConfigError: a file is malformed.
            TemplateError: the template has a syntax error.
        """
        directory = Path(model_dir)
        config_path = directory / TOKENIZER_CONFIG
        config = read_json_object(config_path) or {}
        variables = {
            key: text for key in SPECIAL_TOKENS if (text := special_token_text(config, key, config_path)) is not None
        }
        path = directory / "chat_template.jinja"
        if path.exists():
            try:
                return cls(path.read_text(encoding="utf-8"), where=str(path), variables=variables)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path} can't be read: {_one_line(error)}") from None
        for path in (directory / "chat_template.json", config_path):
            value = (read_json_object(path) or {}).get("chat_template")
            if value is None:
                continue
            named = _named_templates(value, path)
            return cls(
                named["default"],
                where=f"{path} (chat_template)",
                tool_source=named.get("tool_use"),
                variables=variables,
            )
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        preserve_thinking: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: see :class:`Message`; prepared by :func:`normalize_messages`.
            tools: function descriptions in JSON schema, as in the chat-completions protocol.
            add_generation_prompt: end with the header of the assistant's turn.
            enable_thinking: whether the model is to think first; ``None`` leaves it to the
                template.
            preserve_thinking: whether thoughts of earlier turns stay; ``None`` leaves it to the
                template.
            kwargs: further variables of the template.

        Raises:
            TemplateError: the messages are malformed, the template refuses them, or it fails; one
                sentence.
        """
        given = {"enable_thinking": enable_thinking, "preserve_thinking": preserve_thinking}
        for name in sorted(RESERVED & kwargs.keys()):
            raise TemplateError(f"{name} can't be a template variable; it is set by the request itself")
        for name in SWITCHES:
            if given[name] is not None and not isinstance(given[name], bool):
                raise TemplateError(f"{name} is {shown(given[name])}; it must be true or false")
        if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, str)):
            raise TemplateError(f"tools is {shown(tools)}; it must be a list of objects")
        for index, tool in enumerate(tools or ()):
            if not isinstance(tool, Mapping):
                raise TemplateError(f"tools[{index}] is {shown(tool)}; it must be an object")
        variables: dict[str, Any] = {**self._variables, **kwargs}
        variables |= {name: value for name, value in given.items() if value is not None}
        variables |= {
            "messages": normalize_messages(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._tool_template if tools else self._template
        try:
            return template.render(variables)
        except _RefusedError as error:
            raise TemplateError(f"the chat template refuses this conversation: {_one_line(error)}") from None
        except Exception as error:  # a template is a program: any error may come out of it
            where = template.name or ""
            raise TemplateError(
                f"{where}{_line_in(where, error.__traceback__)}: "
                f"the template failed with {type(error).__name__}: "
                f"{_one_line(error)}"
            ) from None

    def render_parts(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> tuple[str, str]:
        """The prompt in two parts: the conversation so far, and the header of the turn to come.

        The first part is also the beginning of the next request's prompt, when this conversation
        goes on; the header may not be, since an empty think block is rendered only there. A
        snapshot belongs between the two.

        Args:
            messages, options: as for :meth:`render`, without ``add_generation_prompt``.

        Returns:
            ``(history, header)``; joined they are the rendered prompt.

        Raises:
            TemplateError: as for :meth:`render`.
        """
        prompt = self.render(messages, **options, add_generation_prompt=True)
        closed = self.render(messages, **options, add_generation_prompt=False)
        shared = len(closed)
        if not prompt.startswith(closed):
            pairs = enumerate(zip(prompt, closed, strict=False))
            shared = next((index for index, (ours, theirs) in pairs if ours != theirs), len(prompt))
        return prompt[:shared], prompt[shared:]


def _named_templates(value: object, path: Path) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list):
        raise ConfigError(f"{path}: chat_template is {shown(value)}; it must be a string or a list of named templates")
    named: dict[str, str] = {}
    for index, entry in enumerate(value):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        template = entry.get("template") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not isinstance(template, str):
            raise ConfigError(
                f"{path}: chat_template[{index}] is {shown(entry)}; it must be an object with name and template"
            )
        named[name] = template
    if "default" not in named:
        raise ConfigError(f"{path}: chat_template names {shown(list(named))}; one of them must be default")
    return named


class _RefusedError(jinja2.TemplateError):
    """Raised by a template through ``raise_exception``."""


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _compile(environment: jinja2.Environment, source: str, where: str) -> jinja2.Template:
    try:
        code = environment.compile(source, name=where, filename=where)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{where}:{error.lineno}: the template has a syntax error: {_one_line(error)}") from None
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def _line_in(where: str, trace: TracebackType | None) -> str:
    """``:line`` of the innermost frame that is the template's, or nothing."""
    line = ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == where:
            line = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
