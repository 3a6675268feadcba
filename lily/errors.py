"""Every error Lily raises for a reason a user can act on.

The command line prints the message of a :class:`LilyError` as one line, without a traceback, and exits with
its ``exit_code``: 1 when the work failed, 2 when the request itself was wrong.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "HostError",
    "LilyError",
    "PluginError",
    "PolicyError",
    "TemplateError",
    "UsageError",
]


class LilyError(Exception):
    """Base of all Lily errors; the message is one sentence fit for a terminal."""

    exit_code = 1


class UsageError(LilyError):
    """The request was malformed: an option, an argument or a field has a value that can't be used."""

    exit_code = 2


class ConfigError(LilyError):
    """A ``config.json`` is missing, malformed, or describes a model this engine can't run."""


class CheckpointError(LilyError):
    """A checkpoint's files or tensors are missing, malformed or inconsistent."""


class PolicyError(UsageError):
    """A policy file has a mistake; the message carries file and line of every one found."""


class PluginError(LilyError):
    """A plugin broke its contract: the message names the plugin and what it should have done."""


class HostError(LilyError):
    """A host can't be opened here, or a device refused or failed the work it was given."""


class TemplateError(UsageError):
    """A conversation that the checkpoint's chat template refuses, or a template that can't be rendered."""


class ContextLengthError(UsageError):
    """A prompt does not fit in the context.

    Args:
        prompt_tokens: length of the prompt, in tokens.
        context_tokens: capacity of the session, in tokens.
    """

    def __init__(self, prompt_tokens: int, context_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        super().__init__(
            f"the prompt is {prompt_tokens} tokens long but the context holds {context_tokens}; "
            "shorten the prompt or raise --max-context"
        )
