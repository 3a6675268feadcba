"""Lily's own kernel plugin: the CPU host and a variant of every op for it.

It uses nothing that a third party's plugin could not use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lily.registry import HostFactory, KernelVariant, hookimpl
from lily_builtin import cpu_attention, cpu_deltanet, cpu_experts, cpu_linear, cpu_route, cpu_sample

if TYPE_CHECKING:
    from lily.hosts.base import Host
    from lily.policy import Execution

__all__ = ["lily_hosts", "lily_variants"]

MODULES = (cpu_linear, cpu_deltanet, cpu_attention, cpu_route, cpu_experts, cpu_sample)


@hookimpl
def lily_variants() -> Sequence[KernelVariant]:
    return [variant for module in MODULES for variant in module.VARIANTS]


@hookimpl
def lily_hosts() -> Sequence[HostFactory]:
    return [HostFactory("cpu", "this machine's processor", "f32", _probe, _identity, _open)]


def _probe() -> str | None:
    return None


def _identity() -> Mapping[str, int | str]:
    return {"host": "cpu"}


def _open(execution: Execution, libraries: Sequence[Path]) -> Host:
    from lily.hosts.cpu import CpuHost

    return CpuHost(threads=execution.threads, libraries=libraries)
