"""Compiles a C++ source into a kernel library, as a plugin's build would."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import lily

__all__ = ["library"]


def library(source: str, folder: Path) -> Path:
    """The shared library of ``source``, built in ``folder`` against Lily's headers."""
    file, target = folder / "kernels.cc", folder / "kernels.so"
    file.write_text(source)
    compiler = os.environ.get("CXX", "c++").split()
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-I{lily.get_include()}"]
    subprocess.run([*compiler, *flags, str(file), "-o", str(target)], check=True)
    return target
