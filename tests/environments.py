"""Lily as it is distributed, installed into fresh environments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Distributions", "Environment"]

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Distributions:
    """An sdist, and a wheel built from it."""

    sdist: Path
    wheel: Path

    @classmethod
    def find(cls, folder: Path) -> Distributions:
        """The one sdist and the one wheel in ``folder``."""
        (sdist,), (wheel,) = folder.glob("lily-*.tar.gz"), folder.glob("lily-*.whl")
        return cls(sdist, wheel)

    @classmethod
    def build(cls, folder: Path) -> Distributions:
        """Build both in ``folder``; what was compiled in this tree with the same flags is not compiled again."""
        _build("--sdist", ROOT, folder)
        (sdist,) = folder.glob("lily-*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        source = folder / sdist.name.removesuffix(".tar.gz")
        if (ROOT / "build" / "objects").exists():
            shutil.copytree(ROOT / "build" / "objects", source / "build" / "objects")
        _build("--wheel", source, folder)
        return cls.find(folder)


def _build(kind: str, source: Path, folder: Path) -> None:
    _check([sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", str(folder), str(source)])


class Environment:
    """A virtual environment with a Lily of its own, and the other packages of the one that runs the tests.

    Args:
        folder: where to make it; must not exist.
        packages: wheels and source folders to install, in this order.
    """

    def __init__(self, folder: Path, *packages: Path) -> None:
        self.folder = folder
        _check([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.packages = folder / "lib" / version / "site-packages"
        # Not a .pth file of the other environment is read: its editable Lily stays out.
        (self.packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        for package in packages:
            self.install(package)

    def install(self, package: Path) -> None:
        """Install a wheel or a source folder without looking for anything else."""
        alone = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
        _check([self.python, "-m", "pip", "install", "--quiet", *alone, str(package)])

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def lily(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the ``lily`` command outside of the source tree."""
        command = [str(self.folder / "bin" / "lily"), *arguments]
        return subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=_outside(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def lily_json(self, *arguments: str, cwd: Path | None = None) -> Any:
        """What a command that has to succeed prints with ``--json``."""
        done = self.lily(*arguments, "--json", cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


def _outside() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def _check(command: list[str]) -> None:
    done = subprocess.run(command, env=_outside(), cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
