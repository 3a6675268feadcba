"""Choosing and opening a host and the policy for it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from difflib import get_close_matches

from lily.errors import HostError, UsageError
from lily.hosts.base import Host
from lily.policy import Policy, auto_policy
from lily.registry import HostFactory, Registry

__all__ = ["choose_policy", "machine", "open_host", "unavailable_reason"]

AUTO = "auto"
# A GPU before the processor beside it; hosts of other plugins only when they are asked for by name.
PREFERRED = ("metal", "cpu")

KNOWN: Mapping[str, str] = {
    "metal": "an Apple silicon Mac with macOS 14 or later and Lily's Metal host",
}


def machine() -> str:
    """This machine in a few words, e.g. ``Linux on x86_64``."""
    system = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    return f"{system} on {platform.machine()}"


def unavailable_reason(name: str, registry: Registry) -> str | None:
    """What host ``name`` needs that this machine lacks; None if it can be opened."""
    factory = registry.hosts.get(name)
    if factory is None:
        return KNOWN.get(name, "a plugin that provides it")
    return factory.probe()


def _factory(name: str, registry: Registry) -> HostFactory:
    factory = registry.hosts.get(name)
    if factory is None and name not in KNOWN:
        close = get_close_matches(name, registry.hosts, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(registry.hosts)}"
        raise UsageError(f"there is no host called {name!r}; {hint}")
    reason = unavailable_reason(name, registry)
    if factory is None or reason is not None:
        usable = [other for other in registry.hosts if unavailable_reason(other, registry) is None]
        raise HostError(f"host {name} needs {reason}; this machine is {machine()} and can run: {', '.join(usable)}")
    return factory


def choose_policy(policy: str, host: str, registry: Registry) -> Policy:
    """The policy to run under.

    Args:
        policy: a file, a name, or ``auto``, which takes the one made for the device.
        host: a host's name, or ``auto``, which takes the policy's, or for ``auto`` the best this machine has.

    Raises:
        PolicyError: the policy has mistakes, or is for another host than the one asked for.
        HostError: the host can't be opened here.
    """
    if policy != AUTO:
        chosen = Policy.load(policy, registry)
        if host not in (AUTO, chosen.host):
            kind = _factory(host, registry).identity()["host"]
            if kind != chosen.host:
                raise UsageError(f"policy {chosen.name} is for host {chosen.host}, not for host {host}")
        return chosen
    if host == AUTO:
        host = next((name for name in PREFERRED if unavailable_reason(name, registry) is None), PREFERRED[-1])
    return auto_policy(registry, _factory(host, registry).identity())


def open_host(host: str, policy: Policy, registry: Registry) -> Host:
    """Open ``host``, or for ``auto`` the one the policy is for.

    Raises:
        HostError: it can't be opened here; says what it needs and what this machine has.
    """
    name = policy.host if host == AUTO else host
    factory = _factory(name, registry)
    missing = policy.missing_variants(registry)
    if missing:
        first = missing[0]
        raise HostError(
            f"policy {policy.name} needs kernels that no plugin here provides: {first.variant} of {first.op} "
            f"({first.source}) and {len(missing) - 1} more; see `lily policy check {policy.name}`"
        )
    return factory.open(policy.execution, registry.kernel_libraries(policy.host))
