"""Lily: a local inference engine for Qwen3.6-35B-A3B.

import lily

engine = lily.load()  # the bundled demo model
for piece in engine.chat([{"role": "user", "content": "Tell me a story about a fox."}]):
    print(piece.text, end="", flush=True)
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lily.errors import LilyError
    from lily.sampling import SamplingParams
    from lily.text_engine import TextEngine, load

__all__ = ["LilyError", "SamplingParams", "TextEngine", "get_include", "load"]

# Imported on first use: `lily --help`, plugins and build scripts need none of them.
_HOMES = {
    "LilyError": "lily.errors",
    "SamplingParams": "lily.sampling",
    "TextEngine": "lily.text_engine",
    "load": "lily.text_engine",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lily")
    if name not in _HOMES:
        raise AttributeError(f"module 'lily' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def get_include() -> Path:
    """The folder of ``abi.h`` and ``simd.h``, for plugins with CPU kernels of their own."""
    return Path(next(iter(import_module("lily.kernels").__path__))) / "cpu"
