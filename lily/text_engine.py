"""The engine with its tokenizer and chat template: text in, text out. What ``lily.load`` gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lily.catalog import Model, find_model
from lily.chat import ChatTemplate
from lily.checkpoint import Checkpoint
from lily.config import load_config
from lily.engine import Engine
from lily.errors import UsageError
from lily.generation import Generation, Prompt
from lily.generation_config import GenerationDefaults, load_generation_config
from lily.hosts.opening import choose_policy, open_host
from lily.reasoning import starts_inside_thinking
from lily.registry import default_registry
from lily.sampling import SamplingParams
from lily.tokenizer import Tokenizer
from lily.weights import load_weights

if TYPE_CHECKING:
    from lily.engine import Progress
    from lily.session import Session

__all__ = ["TextEngine", "load"]


@dataclass(frozen=True)
class _Text:
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults
    eos_ids: tuple[int, ...]


class TextEngine(Engine):
    """An :class:`~lily.engine.Engine` that speaks text; made by :func:`load`.

    Attributes:
        model: name and place of what was loaded.
        tokenizer: the checkpoint's.
        template: the checkpoint's chat template, or None.
        defaults: how ``generation_config.json`` asks to sample.
        eos_ids: token ids that end an answer.
        skipped: tensors of the checkpoint left unused, by reason (vision, MTP).
    """

    def __init__(self, engine_args: Mapping[str, Any], text: _Text, model: Model, skipped: Mapping[str, int]) -> None:
        super().__init__(**engine_args)
        self.model = model
        self.tokenizer = text.tokenizer
        self.template = text.template
        self.defaults = text.defaults
        self.eos_ids = text.eos_ids
        self.skipped = skipped

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session: Session | None = None,
        params: SamplingParams | None = None,
        max_tokens: int | None = None,
        stops: Sequence[str] = (),
        progress: Progress | None = None,
        **template_options: Any,
    ) -> Generation:
        """An answer to a conversation, as an iterable of pieces (``.kind`` reasoning or content, ``.text``).

        Args:
            messages: ``{"role": …, "content": …}`` objects, rendered by the checkpoint's template.
            session: goes on from what it holds; None starts a fresh one.
            params: None takes the checkpoint's own defaults.
            max_tokens: None goes on to the end of the context.
            stops: strings that end the answer just before them.
            progress: called with prompt tokens read and in all.
            template_options: ``enable_thinking``, ``preserve_thinking``, ``tools``, …: see ``ChatTemplate.render``.

        Raises:
            UsageError: the checkpoint has no chat template.
            TemplateError: the template refuses the conversation.
            ContextLengthError: while iterating, if the prompt does not fit.
        """
        if self.template is None:
            raise UsageError(f"{self.model.path} has no chat template; use complete() or --raw")
        history, header = self.template.render_parts(messages, **template_options)
        thinking = starts_inside_thinking(history + header)
        prompt = Prompt(self.tokenizer.encode(history), self.tokenizer.encode(header), thinking)
        return self._generation(prompt, session, params, max_tokens, stops, progress)

    def complete(
        self,
        text: str,
        *,
        session: Session | None = None,
        params: SamplingParams | None = None,
        max_tokens: int | None = None,
        stops: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Generation:
        """A continuation of ``text``, without a chat template; arguments as for :meth:`chat`."""
        return self._generation(Prompt(self.tokenizer.encode(text)), session, params, max_tokens, stops, progress)

    def _generation(
        self,
        prompt: Prompt,
        session: Session | None,
        params: SamplingParams | None,
        max_tokens: int | None,
        stops: Sequence[str],
        progress: Progress | None,
    ) -> Generation:
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}; it must be 1 or more")
        return Generation(
            self,
            self.tokenizer,
            session or self.session(),
            prompt,
            params or SamplingParams.from_defaults(self.defaults),
            max_tokens=max_tokens,
            stop_ids=self.eos_ids,
            stops=stops,
            progress=progress,
        )


def load(
    model: str | Path = "demo",
    *,
    policy: str = "auto",
    host: str = "auto",
    max_context: int = 0,
    cache_tokens: int = 0,
) -> TextEngine:
    """Load a model.

    Args:
        model: a built-in name, a checkpoint's directory, or one ``.safetensors`` file.
        policy: a policy file, a policy's name, or ``auto``.
        host: ``cpu``, ``metal``, …, or ``auto``.
        max_context: tokens a session can hold; 0 takes the model's own limit.
        cache_tokens: tokens all sessions and snapshots can hold together; 0 takes four contexts.

    Raises:
        LilyError: the model, the policy or the host can't be used; one sentence says why.
    """
    registry = default_registry()
    found = find_model(model, weights=True)
    chosen = choose_policy(policy, host, registry)
    config = load_config(found.path)
    if max_context > config.max_position_embeddings:
        raise UsageError(
            f"max_context is {max_context}, but {found.name} was made for {config.max_position_embeddings} tokens"
        )
    tokenizer = Tokenizer.load(found.path)
    text = _Text(
        tokenizer,
        ChatTemplate.load(found.path),
        load_generation_config(found.path),
        tokenizer.eos_ids(found.path, config.eos_token_ids or None),
    )
    mask = tokenizer.valid_ids(config.vocab_size)
    assert found.weights is not None
    checkpoint = Checkpoint.open(found.weights)
    weights = load_weights(checkpoint, config)
    arguments = {
        "weights": weights,
        "host": open_host(host, chosen, registry),
        "policy": chosen,
        "registry": registry,
        "max_context": max_context,
        "cache_tokens": cache_tokens,
        "mask": mask,
    }
    return TextEngine(arguments, text, found, checkpoint.skipped)
