"""Execution settings: how steps are cut, queued and stored, whatever variants do the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

__all__ = ["SETTINGS", "Execution", "Setting"]


@dataclass(frozen=True)
class Setting:
    """What a setting may be: a whole number from ``low`` to ``high``, or one of ``choices``."""

    help: str
    low: int = 0
    high: int = 0
    choices: tuple[str, ...] = ()

    def accepts(self, value: object) -> bool:
        if self.choices:
            return value in self.choices
        return isinstance(value, int) and self.low <= value <= self.high

    def __str__(self) -> str:
        if self.choices:
            return " or ".join(self.choices)
        return f"a whole number from {self.low} to {self.high}"


def _number(default: int, low: int, high: int, help: str) -> Any:
    return field(default=default, metadata={"setting": Setting(help, low, high)})


def _choice(choices: tuple[str, ...], help: str) -> Any:
    """A setting whose default is the first choice."""
    return field(default=choices[0], metadata={"setting": Setting(help, choices=choices)})


@dataclass(frozen=True)
class Execution:
    """The settings of ``execution:``, complete with defaults."""

    prefill_chunk: int = _number(2048, 1, 65536, "tokens a prefill chunk; scratch memory is proportional to it")
    encoder: Literal["concurrent", "serial"] = _choice(
        ("concurrent", "serial"),
        "barriers only where data depends on data, or before every dispatch",
    )
    token_handoff: Literal["device", "host"] = _choice(
        ("device", "host"),
        "the sampled token becomes the next input on the device, or by way of the CPU",
    )
    in_flight: int = _number(2, 1, 4, "decode steps queued at once")
    max_command_buffer_ms: int = _number(
        30, 1, 10000, "estimated milliseconds a submission may take; longer chunks are split by layer"
    )
    kv_dtype: Literal["bf16", "f32", "auto"] = _choice(
        ("bf16", "f32", "auto"),
        "how keys and values are stored; auto is f32 where a whole context of it takes 256 MiB or less, else bf16",
    )
    threads: int = _number(0, 0, 1024, "CPU threads that run kernels; 0 is one a core")
    snapshot_interval: int = _number(
        2048, 0, 1048576, "tokens of prefill between snapshots of the recurrent state; 0 takes none"
    )


SETTINGS: Mapping[str, Setting] = {item.name: item.metadata["setting"] for item in fields(Execution)}
