"""A checkpoint from the Hugging Face hub, through its own library (the ``hub`` extra)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from lily.checkpoint import INDEX_NAME, Checkpoint
from lily.checkpoint_writer import COMPANION_PATTERNS, COMPANIONS
from lily.config import load_config
from lily.errors import LilyError, UsageError
from lily.layout import bind
from lily.tokenizer import Tokenizer

__all__ = ["PullError", "Pulled", "pull"]

SMALL_FILES = ("config.json", INDEX_NAME, *COMPANIONS, *COMPANION_PATTERNS)
WEIGHTS = ("*.safetensors",)
# A pattern's * goes through slashes: other formats of a model often lie in directories of their own.
IGNORED = ("*/*",)


class PullError(LilyError):
    """A checkpoint can't be fetched: no network, no such repository, no permission, no library."""


@dataclass(frozen=True)
class Pulled:
    """What was fetched.

    Attributes:
        path: the model's directory.
        nbytes: bytes of the text model's tensors.
        tensors: how many there are.
        skipped: tensors that are not part of the text model, by reason.
        seconds: for fetching and checking.
    """

    path: Path
    nbytes: int
    tensors: int
    skipped: Mapping[str, int]
    seconds: float


def pull(
    repository: str,
    destination: str | Path | None = None,
    *,
    revision: str | None = None,
    show_progress: bool = False,
) -> Pulled:
    """Fetch a checkpoint and check it.

    The configuration comes first, so that a model Lily can't run is refused before its weights are fetched. What an
    interrupted call has fetched is kept, and the next one goes on from there.

    Args:
        repository: ``OWNER/NAME``.
        destination: a directory; None for the hub library's cache, which other programs share.
        revision: a branch, tag or commit; None for the main branch.
        show_progress: the hub library's own bars on standard error.

    Raises:
        UsageError: the name can't be one, the repository holds no model, or ``destination`` is something else.
        PullError: the hub library isn't installed, or fetching failed.
        ConfigError, CheckpointError: the model is not one that Lily runs, or its files are damaged.
    """
    started = time.perf_counter()
    if destination is not None:
        destination = _checked(Path(destination).expanduser())
    path = _fetch(repository, destination, revision, SMALL_FILES, show_progress)
    if not (path / "config.json").is_file():
        raise UsageError(f"{repository} holds no config.json; expected a model's safetensors checkpoint")
    config = load_config(path)
    path = _fetch(repository, destination, revision, SMALL_FILES + WEIGHTS, show_progress)
    checkpoint = Checkpoint.open(path)
    bind(checkpoint, config)
    Tokenizer.load(path).valid_ids(config.vocab_size)
    return Pulled(path, checkpoint.nbytes, len(checkpoint.tensors), checkpoint.skipped, time.perf_counter() - started)


def _checked(destination: Path) -> Path:
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination} is a file; give a directory")
    # The hub library keeps its state there: a directory that it fetched into, whole or not.
    if destination.is_dir() and any(destination.iterdir()) and not (destination / ".cache" / "huggingface").is_dir():
        raise UsageError(f"{destination} holds something else already; give a new or an empty directory")
    return destination


def _fetch(
    repository: str,
    destination: Path | None,
    revision: str | None,
    patterns: tuple[str, ...],
    show_progress: bool,
) -> Path:
    """Fetch the files that match and return the directory that holds them."""
    try:
        hub, errors, bars = map(
            import_module, ("huggingface_hub", "huggingface_hub.errors", "huggingface_hub.utils.tqdm")
        )
    except ImportError as error:
        raise PullError("fetching needs the Hugging Face hub library: pip install 'lily[hub]'") from error
    hide_bars = not show_progress and not bars.are_progress_bars_disabled()
    if hide_bars:
        bars.disable_progress_bars()
    try:
        path = hub.snapshot_download(
            repository,
            revision=revision,
            local_dir=destination,
            allow_patterns=list(patterns),
            ignore_patterns=list(IGNORED),
        )
    except errors.HFValidationError as error:
        raise UsageError(f"{repository!r} can't be a repository of the hub; expected OWNER/NAME") from error
    except errors.GatedRepoError as error:
        raise PullError(f"{repository} is gated; accept its terms on the hub, then log in: hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        raise PullError(
            f"the hub has no model {repository}, or it is private; check the name, or log in: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise PullError(f"{repository} has no revision {revision!r}") from error
    except Exception as error:  # its network library's own, which changes between versions
        cause: BaseException = error
        if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
            cause = error.__cause__  # "not in the cache either" hides what went wrong
        reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise PullError(
            f"can't fetch {repository}: {reason.rstrip('.')}; the same command goes on from what is there"
        ) from error
    finally:
        if hide_bars:
            bars.enable_progress_bars()
    return Path(path)
