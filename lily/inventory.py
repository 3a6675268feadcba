"""What is installed: plugins with what each provides, and policies with whether they can be used here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from lily.errors import PolicyError
from lily.hosts.opening import unavailable_reason
from lily.policy import MissingVariant, Policy, available
from lily.policy.loading import Library
from lily.registry import BUILTIN, GROUP, KernelVariant, Registry

__all__ = ["PluginInfo", "PolicyInfo", "plugins", "policies"]

LILY = "lily"


@dataclass(frozen=True)
class PluginInfo:
    """One plugin.

    Attributes:
        distribution: the installed distribution it came with; None for one registered by a program.
        version: of the distribution.
        variants, hosts, policies: what it provides.
    """

    name: str
    distribution: str | None
    version: str | None
    variants: tuple[KernelVariant, ...]
    hosts: tuple[str, ...]
    policies: tuple[str, ...]

    @property
    def ops(self) -> tuple[str, ...]:
        """Ops that it has a variant for."""
        return tuple(dict.fromkeys(variant.op for variant in self.variants))


@dataclass(frozen=True)
class PolicyInfo:
    """One policy that can be named.

    Attributes:
        path: its file.
        plugin: where it comes from: ``lily``, or a plugin's name.
        policy: None if it has mistakes.
        reason: why it can't be used here; None if it can.
        missing: rules whose variant no plugin here provides.
    """

    name: str
    path: Path
    plugin: str
    policy: Policy | None
    reason: str | None
    missing: tuple[MissingVariant, ...] = ()

    @property
    def usable(self) -> bool:
        return self.reason is None


def plugins(registry: Registry) -> list[PluginInfo]:
    """Every plugin that is registered, in order; broken ones are in ``registry.broken``."""
    sources = _distributions()
    return [_plugin(registry, name, *sources.get(name, (None, None))) for name in registry.plugins]


def _plugin(registry: Registry, name: str, distribution: str | None, version: str | None) -> PluginInfo:
    return PluginInfo(
        name,
        distribution,
        version,
        tuple(registry.variants(plugin=name)),
        tuple(host for host in registry.hosts if registry.provider("host", host) == name),
        tuple(policy for policy in registry.policies if registry.provider("policy", policy) == name),
    )


def policies(registry: Registry) -> list[PolicyInfo]:
    """Every policy that can be named, Lily's own first."""
    library = Library(registry)
    return [_policy(registry, library, name, path) for name, path in available(registry).items()]


def _policy(registry: Registry, library: Library, name: str, path: Path) -> PolicyInfo:
    plugin = LILY if registry.policies.get(name) != path else registry.provider("policy", name)
    try:
        policy = library.load(name)
    except PolicyError as error:
        return PolicyInfo(name, path, plugin, None, _mistakes(str(error).splitlines()))
    missing = tuple(policy.missing_variants(registry))
    reason = unavailable_reason(policy.host, registry)
    if reason is not None:
        reason = f"host {policy.host} needs {reason}"
    elif missing:
        reason = f"no plugin here provides {missing[0].variant} of {missing[0].op} for host {policy.host}"
    return PolicyInfo(name, path, plugin, policy, reason, missing)


def _mistakes(lines: Sequence[str]) -> str:
    return lines[0] if len(lines) == 1 else f"it has {len(lines)} mistakes, first {lines[0]}"


def _distributions() -> Mapping[str, tuple[str | None, str | None]]:
    """Name and version of the distribution of each installed plugin."""
    found: dict[str, tuple[str | None, str | None]] = {
        entry.name: (entry.dist.name, entry.dist.version) for entry in entry_points(group=GROUP) if entry.dist
    }
    own = next((entry.dist for entry in entry_points(group="console_scripts", name="lily") if entry.dist), None)
    return found if own is None else {BUILTIN: (own.name, own.version), **found}
