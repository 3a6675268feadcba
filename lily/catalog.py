"""Finding a model: one that comes with Lily, by its name, or one on disk, by its path."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from lily.errors import UsageError
from lily.json_file import shown

__all__ = ["BUILTIN", "DEFAULT", "Model", "find_model"]

MODELS = Path(__file__).parent / "models"

BUILTIN = {
    "demo": "a 21.7-million-parameter model of the same architecture, with its weights",
    "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B at 4 bits, its configuration only",
}
DEFAULT = "demo"


@dataclass(frozen=True)
class Model:
    """A model that was found.

    Attributes:
        name: a built-in name, or the name of the directory.
        path: its directory, which holds ``config.json``.
        weights: what :meth:`lily.checkpoint.Checkpoint.open` takes: the directory, or the one file that was asked
            for; None if there are none.
        builtin: it comes with Lily.
    """

    name: str
    path: Path
    weights: Path | None
    builtin: bool


def find_model(model: str | Path = DEFAULT, *, weights: bool = False) -> Model:
    """Find a model by name or path.

    Args:
        model: a built-in name, in any case; or the path of a directory, of its ``config.json``, or of one
            ``.safetensors`` file beside it. A directory that has a built-in name is reached by ``./demo``.
        weights: the caller needs weights; a model that has only a configuration is an error.

    Raises:
        UsageError: there is nothing of that name, or no configuration or weights there; the message gives the
            nearest name that would do.
    """
    name = str(model).lower()
    if name in BUILTIN:
        found = _at(MODELS / name, name, builtin=True)
    else:
        try:
            found = _on_disk(Path(model).expanduser(), str(model))
        except (
            OSError,
            RuntimeError,
        ) as error:  # RuntimeError: ~user for a user that doesn't exist
            raise UsageError(
                f"no model {shown(str(model))}: {error.strerror if isinstance(error, OSError) else error}"
            ) from error
    if weights and found.weights is None:
        if found.builtin:
            raise UsageError(
                f"{found.name} comes as a configuration without weights, for `lily plan` and `lily synth`; "
                "give the path of a downloaded checkpoint instead"
            )
        raise UsageError(f"{found.path} holds no *.safetensors file; a model's directory holds its weights")
    return found


def _on_disk(path: Path, asked: str) -> Model:
    if path.is_dir() and asked:
        directory, file = path, None
    elif path.is_file() and path.name == "config.json":
        directory, file = path.parent, None
    elif path.is_file() and path.suffix == ".safetensors":
        directory, file = path.parent, path
    elif path.exists() and asked:
        raise UsageError(f"{path} is not a model; expected a directory, a config.json or a .safetensors file")
    else:
        raise UsageError(f"no model {shown(asked)}: neither a built-in name nor a path{_nearest(path, asked)}")
    if not (directory / "config.json").is_file():
        raise UsageError(f"{directory} holds no config.json; a model's directory holds one{_inside(directory)}")
    return _at(directory, directory.resolve().name, builtin=False, file=file)


def _at(directory: Path, name: str, *, builtin: bool, file: Path | None = None) -> Model:
    weights = file or (directory if any(directory.glob("*.safetensors")) else None)
    return Model(name, directory, weights, builtin)


def _nearest(path: Path, asked: str) -> str:
    """What the user may have meant: a built-in name, or a neighbour of the path."""
    beside = path.parent
    try:
        neighbours = [str(beside / entry.name) for entry in beside.iterdir() if _is_model(entry)]
    except OSError:  # there is no such directory, so there are no neighbours either
        neighbours = []
    close = difflib.get_close_matches(asked.lower(), BUILTIN, n=1, cutoff=0.5)
    close += difflib.get_close_matches(str(path), neighbours, n=1, cutoff=0.7)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; built-in are {' and '.join(BUILTIN)}"


def _inside(directory: Path) -> str:
    """A model one level below, as in a directory of models."""
    models = sorted(entry for entry in directory.iterdir() if _is_model(entry))
    return f"; did you mean {models[0]}?" if models else ""


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file()
