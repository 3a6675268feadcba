"""A JSON file of a checkpoint, and how its values are shown in messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lily.errors import ConfigError

__all__ = ["read_json_object", "shown"]


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, or ``None`` when there is no such file.

    Raises:
        ConfigError: the file can't be read, is not JSON (the message gives line and column), or is
            not an object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno} is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds {shown(document)}; it must be a JSON object")
    return document


def shown(value: object) -> str:
    """A value as JSON writes it, cut short so that it fits in a sentence."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):  # keys that are not strings, cycles, too deep
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
