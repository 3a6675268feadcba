"""Typed reading of a configuration's keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lily.errors import ConfigError
from lily.json_file import shown

__all__ = ["Keys"]


class Keys:
    """Typed reading of one JSON object; every failure names the key, its value, and what would be right."""

    def __init__(self, mapping: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.mapping = mapping
        self.source = source
        self.prefix = prefix

    def wrong(self, key: str, expected: str) -> ConfigError:
        if key not in self.mapping:
            return ConfigError(f"{self.source}: {self.prefix}{key} is missing; expected {expected}")
        return ConfigError(f"{self.source}: {self.prefix}{key} is {shown(self.mapping[key])}; expected {expected}")

    def integer(self, key: str, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        value = self.mapping.get(key)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.wrong(key, f"an integer from {minimum} to {maximum}")
        return value

    def multiple(self, key: str, of: str) -> int:
        value, divisor = self.integer(key), self.integer(of)
        if value % divisor:
            raise self.wrong(key, f"a multiple of {self.prefix}{of}, which is {divisor}")
        return value

    def number(self, key: str) -> float:
        value = self.mapping.get(key)
        # Bounded by what float32 holds, as the kernels take it.
        if isinstance(value, (int, float)) and type(value) is not bool and 1e-30 <= value <= 1e30:
            return float(value)
        raise self.wrong(key, "a positive number")

    def choice(self, key: str, allowed: tuple[object, ...]) -> None:
        value = self.mapping.get(key)
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self.wrong(key, " or ".join(json.dumps(one) for one in allowed))

    def section(self, key: str) -> Keys | None:
        value = self.mapping.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Keys(value, self.source, f"{self.prefix}{key}.")
