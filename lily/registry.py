"""The registry: kernel variants and hosts, provided by pluggy plugins and validated as they come in.

A plugin is a module or object that implements some of the hooks of :class:`PluginSpec` and is named by an entry
point of group ``lily``. A plugin that fails to import, or provides something malformed, is left out whole and
named in one line (:attr:`Registry.broken`); everything else keeps working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from lily.errors import LilyError, PluginError
from lily.ops import OPS, Op
from lily.plan import Plan

if TYPE_CHECKING:
    from lily.hosts.base import Host
    from lily.policy import Execution

__all__ = ["HostFactory", "KernelVariant", "Option", "PluginSpec", "Registry", "default_registry", "hookimpl"]

GROUP = "lily"
BUILTIN = "lily_builtin"
hookspec = pluggy.HookspecMarker("lily")
hookimpl = pluggy.HookimplMarker("lily")


@dataclass(frozen=True)
class Option:
    """A parameter that a policy may set under ``with:``.

    Attributes:
        default: used where the policy says nothing.
        choices: every legal value; policies are checked against it and ``lily tune`` tries each.
        help: one line, units included.
    """

    default: int | str
    choices: tuple[int | str, ...]
    help: str


@dataclass(frozen=True)
class KernelVariant:
    """One way to do one op on one kind of host.

    Attributes:
        op: a key of ``lily.ops.OPS``.
        name: unique for its op and host.
        host: ``cpu``, ``metal``, ... the kind of host whose kernels it dispatches.
        encode: ``encode(op, plan, **options)`` appends dispatches to the plan; options are complete and checked.
        accepts: whether it can do this op at this shape (phase included).
        requirement: in words, what ``accepts`` asks for; ends the sentence "needs …".
        options: what ``with:`` may set.
        summary: one line for ``lily plugins list``.
    """

    op: str
    name: str
    host: str
    encode: Callable[..., None]
    summary: str
    accepts: Callable[[Op], bool] = field(default=lambda op: True)
    requirement: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.op, self.host, self.name)

    def complete(self, given: Mapping[str, object]) -> dict[str, object]:
        """The options given, with defaults for the rest."""
        return {name: given.get(name, option.default) for name, option in self.options.items()}

    def record(self, op: Op, plan: Plan, given: Mapping[str, object]) -> None:
        """Encode ``op``, with defaults for the options not given.

        Raises:
            PluginError: ``encode`` failed.
        """
        try:
            self.encode(op, plan, **self.complete(given))
        except LilyError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise PluginError(f"variant {self.name} of {self.op} could not encode {op.label}: {what}") from error


@dataclass(frozen=True)
class HostFactory:
    """A kind of host.

    Attributes:
        name: what ``--host`` and a policy's ``match: {host: …}`` call it.
        summary: one line for ``lily doctor``.
        activation_dtype: what it keeps activations in, f32 or bf16.
        probe: why it can't be opened here, in words that end the sentence "host … needs …"; None if it can.
        identity: what policies may match: ``host``, and ``generation``, ``suffix``, ``gpu_cores`` of a GPU.
        open: opens it, under a policy's execution settings and with libraries of plugins' kernels.
    """

    name: str
    summary: str
    activation_dtype: str
    probe: Callable[[], str | None]
    identity: Callable[[], Mapping[str, int | str]]
    open: Callable[[Execution, Sequence[Path]], Host]


class PluginSpec:
    """The hooks a plugin may implement; each returns a sequence, read once at registration."""

    @hookspec
    def lily_variants(self) -> Sequence[KernelVariant]:
        """Kernel variants."""
        return ()

    @hookspec
    def lily_hosts(self) -> Sequence[HostFactory]:
        """Kinds of host."""
        return ()

    @hookspec
    def lily_kernel_libraries(self, host: str) -> Sequence[Path]:
        """Native kernels for a kind of host: for ``cpu``, shared libraries as kernels/cpu/abi.h describes them."""
        return ()

    @hookspec
    def lily_policies(self) -> Sequence[Path]:
        """Policy files, found by name after Lily's own."""
        return ()


class Registry:
    """Plugins, and what they provide."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("lily")
        self._manager.add_hookspecs(PluginSpec)
        self._variants: dict[tuple[str, str, str], KernelVariant] = {}
        self._hosts: dict[str, HostFactory] = {}
        self._policies: dict[str, Path] = {}
        self._owners: dict[tuple[str, ...], str] = {}
        self._order: list[str] = []
        self.broken: dict[str, str] = {}

    def register(self, plugin: object, name: str) -> None:
        """Add a plugin, whole or not at all.

        Raises:
            PluginError: the plugin provides something malformed or a name already taken.
        """
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
            variants = [self._checked_variant(name, item) for item in self._provided(plugin, "lily_variants")]
            hosts = [
                self._checked(name, "lily_hosts", item, HostFactory) for item in self._provided(plugin, "lily_hosts")
            ]
            policies = [
                self._checked(name, "lily_policies", item, Path) for item in self._provided(plugin, "lily_policies")
            ]
            self._refuse_taken(name, [variant.key for variant in variants], "variant")
            self._refuse_taken(name, [("host", host.name) for host in hosts], "host")
            self._refuse_taken(name, [("policy", path.stem) for path in policies], "policy")
        except Exception as error:
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            if isinstance(error, PluginError):
                raise
            raise PluginError(f"plugin {name}: {type(error).__name__}: {error}") from error
        self._variants.update((variant.key, variant) for variant in variants)
        self._hosts.update((host.name, host) for host in hosts)
        self._policies.update((path.stem, path) for path in policies)
        for key in [
            *(v.key for v in variants),
            *(("host", h.name) for h in hosts),
            *(("policy", p.stem) for p in policies),
        ]:
            self._owners[key] = name
        self._order.append(name)

    def load_entry_points(self) -> None:
        """Register every installed plugin; a broken one goes to :attr:`broken` with its reason."""
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            if entry.name in self._order:
                continue
            try:
                self.register(entry.load(), entry.name)
            except PluginError as error:
                self.broken[entry.name] = str(error)
            except Exception as error:  # an import may fail in any way; the reason is kept and shown
                self.broken[entry.name] = f"plugin {entry.name}: {type(error).__name__}: {error}"

    def block(self, name: str) -> None:
        """Unregister a plugin and all it provides."""
        self._manager.unregister(name=name)
        for key in [key for key, owner in self._owners.items() if owner == name]:
            del self._owners[key]
            if key[0] == "host":
                del self._hosts[key[1]]
            elif key[0] == "policy":
                del self._policies[key[1]]
            else:
                del self._variants[(key[0], key[1], key[2])]
        self._order.remove(name)

    @property
    def plugins(self) -> list[str]:
        return list(self._order)

    @property
    def hosts(self) -> Mapping[str, HostFactory]:
        return self._hosts

    @property
    def policies(self) -> Mapping[str, Path]:
        return self._policies

    def variants(
        self, *, op: str | None = None, host: str | None = None, plugin: str | None = None
    ) -> list[KernelVariant]:
        """Variants in order of registration, filtered."""
        return [
            variant
            for key, variant in self._variants.items()
            if op in (None, variant.op) and host in (None, variant.host) and plugin in (None, self._owners[key])
        ]

    def variant(self, op: str, host: str, name: str) -> KernelVariant | None:
        return self._variants.get((op, host, name))

    def owner(self, variant: KernelVariant) -> str:
        """The plugin that provides ``variant``."""
        return self._owners[variant.key]

    def provider(self, kind: Literal["host", "policy"], name: str) -> str:
        """The plugin that provides a host or a policy."""
        return self._owners[kind, name]

    def kernel_libraries(self, host: str) -> list[Path]:
        found: list[Path] = []
        for paths in self._manager.hook.lily_kernel_libraries(host=host):
            found.extend(paths)
        return found

    @staticmethod
    def _provided(plugin: object, hook: str) -> Iterable[Any]:
        function = getattr(plugin, hook, None)
        return () if function is None else function()

    @staticmethod
    def _checked(plugin: str, hook: str, item: Any, kind: type[Any]) -> Any:
        if not isinstance(item, kind):
            raise PluginError(f"plugin {plugin}: {hook} must return {kind.__name__} objects, not {type(item).__name__}")
        return item

    def _checked_variant(self, plugin: str, item: Any) -> KernelVariant:
        variant: KernelVariant = self._checked(plugin, "lily_variants", item, KernelVariant)
        if variant.op not in OPS:
            raise PluginError(
                f"plugin {plugin}: variant {variant.name!r} is for op {variant.op!r}, which is none of {', '.join(OPS)}"
            )
        if not variant.name.isidentifier() or not variant.host:
            raise PluginError(
                f"plugin {plugin}: variant {variant.name!r} of {variant.op} needs an identifier as its name and a host"
            )
        for name, option in variant.options.items():
            if not isinstance(option, Option) or option.default not in option.choices:
                raise PluginError(
                    f"plugin {plugin}: option {name!r} of {variant.op}/{variant.name} needs a default among its choices"
                )
        return variant

    def _refuse_taken(self, plugin: str, keys: Sequence[tuple[str, ...]], what: str) -> None:
        seen: set[tuple[str, ...]] = set()
        for key in keys:
            if key in self._owners or key in seen:
                owner = self._owners.get(key, plugin)
                raise PluginError(f"plugin {plugin}: {what} {'/'.join(key)} is already provided by plugin {owner}")
            seen.add(key)


@lru_cache(maxsize=1)
def default_registry() -> Registry:
    """Lily's own plugin and every installed one, loaded once a process."""
    import lily_builtin

    registry = Registry()
    registry.register(lily_builtin, BUILTIN)
    registry.load_entry_points()
    return registry
