"""How the next token is drawn: the parameters of sampling, checked once and never changed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from lily.errors import UsageError

if TYPE_CHECKING:
    from lily.generation_config import GenerationDefaults

__all__ = ["GREEDY_BELOW", "LEGAL", "LegalRange", "SamplingParams"]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: clients that may not say 0 send so little to mean it."""


@dataclass(frozen=True)
class LegalRange:
    """The values a parameter may have.

    Attributes:
        low, high: bounds, both legal unless ``above_low``.
        above_low: ``low`` itself is not legal.
        integer: only whole numbers are legal.
        note: what the bounds mean, for the message of an error.
    """

    low: float
    high: float
    above_low: bool = False
    integer: bool = False
    note: str = ""

    def admits(self, value: object) -> bool:
        """Whether ``value`` is a number of the right kind, finite, and inside the bounds."""
        if isinstance(value, bool) or not isinstance(value, Integral if self.integer else Real):
            return False
        number: Any = value  # numbers.Real declares no order to compare by
        low: bool = self.low < number if self.above_low else self.low <= number
        return low and bool(number <= self.high)

    def __str__(self) -> str:
        kind = "a whole number" if self.integer else "a number"
        low = f"above {self.low}" if self.above_low else f"from {self.low}"
        return f"{kind} {low} to {self.high}{f' ({self.note})' if self.note else ''}"


LEGAL: dict[str, LegalRange] = {
    "temperature": LegalRange(0, 100, note="0 is greedy"),
    "top_k": LegalRange(0, 2**31 - 1, integer=True, note="0 turns it off"),
    "top_p": LegalRange(0, 1, above_low=True, note="1 turns it off"),
    "min_p": LegalRange(0, 1, note="0 turns it off"),
    "repetition_penalty": LegalRange(0, 10, above_low=True, note="1 turns it off"),
    "presence_penalty": LegalRange(-2, 2, note="0 turns it off"),
    "frequency_penalty": LegalRange(-2, 2, note="0 turns it off"),
    "seed": LegalRange(0, 2**64 - 1, integer=True),
}
"""The legal range of every field of :class:`SamplingParams`."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, applied in this order: penalties, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: keep only the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens whose probabilities together reach p; 1 keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
        repetition_penalty: logits of tokens already seen are divided by it when positive,
            multiplied by it when negative; 1 leaves them.
        presence_penalty: subtracted from the logits of tokens already generated; 0 leaves them.
        frequency_penalty: the same, once for every time the token was generated.
        seed: of the random numbers, unsigned 64 bits; ``None`` draws one from the system.

    Raises:
        UsageError: a value is not a finite number in its legal range (:data:`LEGAL`); the message
            names the field, the value and the range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, legal in LEGAL.items():
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if not legal.admits(value):
                raise UsageError(f"{name} is {value!r:.60}; it must be {legal}")
            object.__setattr__(self, name, int(value) if legal.integer else float(value))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token, after penalties, is always the one taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @classmethod
    def from_defaults(cls, defaults: GenerationDefaults, **overrides: Any) -> SamplingParams:
        """Parameters as the checkpoint's generation config asks, with what the caller chose on top.

        Args:
            defaults: what ``generation_config.json`` says. ``do_sample: false`` makes the
                temperature 0; ``do_sample: true`` without a temperature makes it 1.
            overrides: fields of this class; ``None`` means not chosen.

        Raises:
            UsageError: an override is not a field, or a value is not legal.
        """
        known = {field.name for field in fields(cls)}
        for name in overrides:
            if name not in known:
                raise UsageError(
                    f"unknown sampling parameter {name!r:.60}; the parameters are {', '.join(sorted(known))}"
                )
        values: dict[str, Any] = {name: value for name in known if (value := getattr(defaults, name, None)) is not None}
        if defaults.do_sample is False:
            values["temperature"] = 0.0
        elif defaults.do_sample and defaults.temperature is None:
            values["temperature"] = 1.0
        values.update({name: value for name, value in overrides.items() if value is not None})
        return cls(**values)
