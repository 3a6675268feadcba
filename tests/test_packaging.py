"""What is distributed: all sources in the sdist, all that runs in the wheel, which works where it is installed."""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.environments import ROOT, Distributions, Environment

SOURCE_FOLDERS = ("lily", "kernels", "plugins", "tests", "tools", "docs")
GENERATED = (".so", ".o", ".pyc")


def sources(folder: str) -> set[str]:
    """Paths of the files of a folder that are not made from others."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {
        str(path.relative_to(ROOT))
        for path in found
        if path.suffix not in GENERATED
        and not any(part.endswith((".egg-info", "_cache")) or part in ("build", ".hypothesis") for part in path.parts)
    }


@pytest.fixture(scope="module")
def wheel_files(distributions: Distributions) -> set[str]:
    with zipfile.ZipFile(distributions.wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def environment(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("packaging") / "venv", distributions.wheel)


@pytest.mark.parametrize("folder", SOURCE_FOLDERS)
def test_the_sdist_holds_every_source(distributions: Distributions, folder: str) -> None:
    with tarfile.open(distributions.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "Makefile", "README.md", "LICENSE"} <= held
    assert sources(folder) - held == set()
    assert not [name for name in held if name.endswith(GENERATED)]


@pytest.mark.parametrize(
    ("folder", "installed", "kinds"),
    [
        ("lily", "lily", (".py", ".pyi", ".yaml", ".typed", ".json", ".jinja", ".safetensors")),
        ("kernels", "lily/kernels", (".py", ".h", ".cc", ".metal")),
        ("plugins/lily_builtin/lily_builtin", "lily_builtin", (".py",)),
    ],
)
def test_the_wheel_holds_all_that_runs(
    wheel_files: set[str], folder: str, installed: str, kinds: tuple[str, ...]
) -> None:
    wanted = {installed + name.removeprefix(folder) for name in sources(folder) if name.endswith(kinds)}
    assert wanted
    assert wanted - wheel_files == set()


def test_the_wheel_holds_nothing_else(wheel_files: set[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel_files}
    assert tops == {"lily", "lily_builtin", next(top for top in tops if top.endswith(".dist-info"))}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_files)
    assert not [name for name in wheel_files if name.endswith((".pyx", ".cpp", ".pyc"))]
    assert len([name for name in wheel_files if name.endswith(".so")]) == 1


def test_the_installed_command_writes_a_story(environment: Environment) -> None:
    story = environment.lily_json("run", "-p", "Tell me a story about a fox.", "--temperature", "0")
    assert (story["model"], story["host"]) == ("demo", "cpu")
    assert "fox" in story["text"]


def test_the_installed_package_is_the_one_that_was_built(environment: Environment) -> None:
    code = "import lily; print(lily.__file__, lily.get_include(), lily.__version__, sep='\\n')"
    done = subprocess.run([environment.python, "-I", "-c", code], capture_output=True, text=True, check=True)
    file, include, version = done.stdout.splitlines()
    assert Path(file).is_relative_to(environment.packages)
    assert Path(include).is_relative_to(environment.packages)
    assert {"abi.h", "simd.h", "step.h"} <= set(os.listdir(include))
    assert environment.lily("--version").stdout == f"lily {version}\n"
