"""Finding policy files, following ``extends``, merging, and choosing one for a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lily.errors import PolicyError
from lily.ops import OPS
from lily.policy.conditions import Condition
from lily.policy.document import Mistakes, unknown
from lily.policy.execution import Execution
from lily.policy.file import PolicyFile, read_file
from lily.policy.policy import Policy
from lily.policy.rules import OpRules, check_coverage, check_variants
from lily.registry import Registry

__all__ = ["Library", "auto_policy", "available"]

SHIPPED = Path(__file__).parent.parent / "policies"
_SUFFIXES = (".yaml", ".yml")
_log = logging.getLogger(__name__)


def available(registry: Registry) -> dict[str, Path]:
    """Policies that can be named: Lily's own, sorted, then those of plugins."""
    own = {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}
    return {**own, **{name: path for name, path in registry.policies.items() if name not in own}}


class Library:
    """Policy files, found by path or by name; each is read once."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._named = available(registry)
        self._read: dict[Path, PolicyFile] = {}

    def load(self, name_or_path: str | Path) -> Policy:
        """See :meth:`Policy.load`."""
        return self._merge(self._chain(*self._find(name_or_path)))

    def match_of(self, name: str) -> Mapping[str, Condition]:
        """What a named policy matches, without checking its rules against the registry."""
        chain = self._chain(*self._find_named(name))
        _mistakes_of(chain).check()
        return _match_of(chain)

    def _find(self, name_or_path: str | Path) -> tuple[Path, str]:
        text = os.fspath(name_or_path)
        path = Path(text)
        if os.path.isfile(path):
            return path, text
        if isinstance(name_or_path, Path) or path.name != text:
            raise PolicyError(f"there is no policy file {text!r}")
        return self._find_named(text)

    def _find_named(self, name: str) -> tuple[Path, str]:
        stem = name
        for suffix in _SUFFIXES:
            stem = stem.removesuffix(suffix)
        found = self._named.get(stem)
        if found is None:
            no_file = f"there is no file {name!r} here; " if stem != name else ""
            raise PolicyError(no_file + unknown("policy", stem, tuple(self._named)))
        return found, found.name

    def _find_base(self, child: PolicyFile) -> tuple[Path, str]:
        """The file that ``extends`` names: beside the child if it is written like a file, else by name."""
        name = child.extends or ""
        has_folder = Path(name).name != name
        if has_folder or name.endswith(_SUFFIXES):
            beside = child.path.parent / name
            file = str(Path(child.file).parent / name)
            if os.path.isfile(beside):
                return beside, file
            if has_folder:
                raise PolicyError(f"there is no policy file {file!r}")
        return self._find_named(name)

    def _file(self, path: Path, file: str) -> PolicyFile:
        key = path.resolve()
        if key not in self._read:
            self._read[key] = read_file(path, file)
        return self._read[key]

    def _chain(self, path: Path, file: str) -> list[PolicyFile]:
        """A file and what it extends, itself first; what can't be followed is a mistake of the file that names it."""
        chain = [self._file(path, file)]
        while chain[-1].extends is not None:
            child = chain[-1]
            try:
                base = self._file(*self._find_base(child))
                if base in chain:
                    circle = " → ".join(item.file for item in [*chain, base])
                    raise PolicyError(f"a policy can't build on itself: {circle}")
            except PolicyError as error:
                child.mistakes.add(child.file, child.extends_line, f"extends: {error}")
                child.whole = False
                break
            chain.append(base)
        return chain

    def _merge(self, chain: Sequence[PolicyFile]) -> Policy:
        """One policy of a chain: a nearer file's settings go before, and its rules of an op replace the others'."""
        mistakes = _mistakes_of(chain)
        own = chain[0]
        settings: dict[str, int | str] = {}
        kernels: dict[str, OpRules] = {}
        sources: dict[str, str] = {}
        for item in reversed(chain):
            settings.update(item.execution)
            kernels.update(item.kernels)
            sources.update(item.sources)
        missing = [op for op in OPS if op not in kernels]
        if missing and all(item.whole for item in chain):
            mistakes.add(
                own.file,
                own.kernels_line,
                f"no rules for {', '.join(missing)}; every op needs some, here or in a policy that this one extends",
            )
        policy = Policy(
            own.name,
            own.path,
            tuple(item.file for item in chain[1:]),
            _match_of(chain),
            Execution(**settings),  # type: ignore[arg-type]  # checked one by one against SETTINGS
            {op: kernels[op].rules for op in OPS if op in kernels},
            sources,
        )
        known_host = bool(self._registry.variants(host=policy.host))
        for of_op in kernels.values():
            if not of_op.flawed:
                check_coverage(of_op.rules, mistakes)
            if known_host:
                check_variants(of_op.rules, policy.host, self._registry, mistakes)
        mistakes.check()
        return policy


def _mistakes_of(chain: Sequence[PolicyFile]) -> Mistakes:
    mistakes = Mistakes()
    for item in reversed(chain):
        mistakes.extend(item.mistakes)
    return mistakes


def _match_of(chain: Sequence[PolicyFile]) -> dict[str, Condition]:
    match: dict[str, Condition] = {}
    for item in reversed(chain):
        match.update(item.match)
    return match


def auto_policy(registry: Registry, identity: Mapping[str, int | str]) -> Policy:
    """The policy made for a device: of those whose ``match`` fits it, the one with the most keys.

    Args:
        identity: what the device is, e.g. host metal, generation 17, suffix s, gpu_cores 40. A policy that matches
            by a key the device does not have does not fit it.

    Raises:
        PolicyError: none fits, or the one that does has mistakes.
    """
    library = Library(registry)
    best, most = None, 0
    for name, path in available(registry).items():
        try:
            match = library.match_of(name)
        except PolicyError as error:
            if path.parent == SHIPPED:
                raise
            _log.warning("policy %s of a plugin is left out: %s", name, error)
            continue
        fits = all(key in identity and match[key].holds(identity[key]) for key in match)
        if fits and len(match) > most:
            best, most = name, len(match)
    if best is None:
        device = ", ".join(f"{key} {value}" for key, value in identity.items())
        raise PolicyError(f"no policy matches this device ({device}); choose one of {', '.join(available(registry))}")
    return library.load(best)
