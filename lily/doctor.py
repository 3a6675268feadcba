"""What ``lily doctor`` finds out: what this machine can run, what stands in the way, and which models fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lily.config import ModelConfig
from lily.errors import LilyError
from lily.fit import Fit, ModelSize, model_size
from lily.hosts.opening import KNOWN, choose_policy, unavailable_reason
from lily.inventory import PluginInfo, plugins
from lily.machine import Machine, read_machine
from lily.policy import Policy
from lily.registry import Registry

__all__ = ["Diagnosis", "HostReport", "InstructionSet", "ModelReport", "diagnose"]

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class HostReport:
    """One kind of host; ``reason`` says what it needs that is not here, None if it can be used."""

    name: str
    summary: str
    reason: str | None

    @property
    def usable(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class InstructionSet:
    """One that the CPU kernels were compiled for."""

    name: str
    runs_here: bool
    chosen: bool


@dataclass(frozen=True)
class ModelReport:
    """One model: its sizes and how it fits, or ``error``, why it can't be run here at all."""

    name: str
    size: ModelSize | None
    fits: tuple[Fit, ...]
    largest_context: int | None
    error: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        policy: what ``--policy auto`` takes; None, with ``policy_error``, if it can't take any.
        broken: plugins that were left out, with the reason.
    """

    machine: Machine
    hosts: tuple[HostReport, ...]
    instruction_sets: tuple[InstructionSet, ...]
    policy: Policy | None
    policy_error: str | None
    plugins: tuple[PluginInfo, ...]
    broken: dict[str, str]
    models: tuple[ModelReport, ...]

    @property
    def works(self) -> bool:
        """Whether anything can be run."""
        return any(host.usable for host in self.hosts)


def diagnose(
    registry: Registry, models: Sequence[tuple[str, ModelConfig]], machine: Machine | None = None
) -> Diagnosis:
    """Look at this machine and at what is installed.

    Args:
        models: names and configurations of models to fit in memory.
        machine: this one, if None.
    """
    machine = machine or read_machine()
    sets, cpu_reason = _instruction_sets()
    names = list(dict.fromkeys([*registry.hosts, *KNOWN]))
    hosts = tuple(_host(name, registry, cpu_reason if name == "cpu" else None) for name in names)
    policy, policy_error = None, None
    try:
        policy = choose_policy("auto", "auto", registry)
    except LilyError as error:
        policy_error = str(error)
    return Diagnosis(
        machine=machine,
        hosts=hosts,
        instruction_sets=sets,
        policy=policy,
        policy_error=policy_error,
        plugins=tuple(plugins(registry)),
        broken=dict(registry.broken),
        models=tuple(_model(name, config, policy, registry, machine) for name, config in models),
    )


def _instruction_sets() -> tuple[tuple[InstructionSet, ...], str | None]:
    """Those of the CPU kernels, best first, and what is wrong with them, as the end of "host cpu needs …"."""
    try:
        from lily import _cpu
        from lily.hosts.cpu import choose_isa
    except ImportError as error:
        return (), f"Lily's compiled part, which does not load ({error}); install Lily again"
    found: list[tuple[str, bool]] = _cpu.isa_names()
    chosen, reason = None, None
    try:
        chosen = choose_isa()
    except LilyError as error:
        reason = f"a usable instruction set: {error}"
    return tuple(InstructionSet(name, runs, name == chosen) for name, runs in found), reason


def _host(name: str, registry: Registry, reason: str | None) -> HostReport:
    factory = registry.hosts.get(name)
    if reason is None:
        try:
            reason = unavailable_reason(name, registry)
        except Exception as error:  # a plugin's probe may fail in any way, which is a reason too
            reason = f"a probe that works: {type(error).__name__}: {error}"
    return HostReport(name, "" if factory is None else factory.summary, reason)


def _model(name: str, config: ModelConfig, policy: Policy | None, registry: Registry, machine: Machine) -> ModelReport:
    if policy is None:
        return ModelReport(name, None, (), None, "there is no policy to run it under")
    try:
        size = model_size(config, name, policy, registry)
    except LilyError as error:
        return ModelReport(name, None, (), None, str(error))
    available = machine.memory.available
    contexts = dict.fromkeys([min(DEFAULT_CONTEXT, size.limit), size.limit])
    fits = tuple(size.fit(context, available) for context in contexts)
    return ModelReport(name, size, fits, None if available is None else size.largest_context(available))
