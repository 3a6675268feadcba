"""The registry: what a plugin may provide, and what happens to one that breaks the rules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lily.errors import PluginError
from lily.ops import OPS, Op
from lily.plan import Plan
from lily.registry import HostFactory, KernelVariant, Option, Registry, default_registry, hookimpl


def encode(op: Op, plan: Plan, **options: object) -> None:
    """Records nothing."""


def variant(op: str = "embed", name: str = "rows", **changes: Any) -> KernelVariant:
    return KernelVariant(**{"op": op, "name": name, "host": "cpu", "encode": encode, "summary": "", **changes})


def plugin(**hooks: Any) -> SimpleNamespace:
    return SimpleNamespace(**{f"lily_{name}": hookimpl(lambda value=value: value) for name, value in hooks.items()})


def test_variants_are_found_by_op_host_and_plugin() -> None:
    registry = Registry()
    registry.register(plugin(variants=[variant(), variant(name="other"), variant(host="metal")]), "first")
    registry.register(plugin(variants=[variant(op="sample", name="device")]), "second")
    assert [v.name for v in registry.variants(op="embed", host="cpu")] == ["rows", "other"]
    assert [v.op for v in registry.variants(plugin="second")] == ["sample"]
    found = registry.variant("embed", "metal", "rows")
    assert found is not None
    assert registry.owner(found) == "first"
    assert registry.plugins == ["first", "second"]


def test_options_are_completed_with_defaults() -> None:
    options = {"tile_rows": Option(16, (16, 32), "rows"), "order": Option("row", ("row", "column"), "layout")}
    seen: dict[str, object] = {}
    item = variant(options=options, encode=lambda op, plan, **given: seen.update(given))
    item.record(None, Plan(), {"tile_rows": 32})  # type: ignore[arg-type]
    assert seen == {"tile_rows": 32, "order": "row"}


@pytest.mark.parametrize(
    ("provided", "message"),
    [
        ({"variants": ["rows"]}, "must return KernelVariant objects, not str"),
        ({"variants": [variant(op="attn")]}, "variant 'rows' is for op 'attn', which is none of embed"),
        ({"variants": [variant(name="two words")]}, "needs an identifier as its name"),
        ({"variants": [variant(options={"t": Option(8, (16,), "")})]}, "option 't' of embed/rows needs a default"),
        ({"variants": [variant(), variant()]}, "variant embed/cpu/rows is already provided by plugin bad"),
        ({"hosts": ["cpu"]}, "must return HostFactory objects"),
        ({"policies": ["fast.yaml"]}, "must return Path objects"),
        ({"variants": 3}, "plugin bad: TypeError"),
    ],
)
def test_a_malformed_plugin_is_refused_whole_and_named(provided: dict[str, Any], message: str) -> None:
    registry = Registry()
    with pytest.raises(PluginError, match="plugin bad") as caught:
        registry.register(plugin(**provided), "bad")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert registry.plugins == []
    assert registry.variants() == []


def test_a_name_is_provided_once() -> None:
    registry = Registry()
    registry.register(plugin(variants=[variant()]), "first")
    with pytest.raises(PluginError, match="embed/cpu/rows is already provided by plugin first"):
        registry.register(plugin(variants=[variant(name="fine"), variant()]), "second")
    assert registry.variant("embed", "cpu", "fine") is None


def test_a_misspelt_hook_is_an_error() -> None:
    bad = SimpleNamespace(lily_varients=hookimpl(lambda: []))
    with pytest.raises(PluginError, match="lily_varients"):
        Registry().register(bad, "bad")


def test_a_blocked_plugin_takes_everything_with_it() -> None:
    registry = Registry()
    factory = HostFactory("toy", "", "f32", lambda: None, lambda: {"host": "toy"}, lambda execution, libraries: None)  # type: ignore[arg-type, return-value]
    registry.register(plugin(variants=[variant()], hosts=[factory], policies=[Path("p/fast.yaml")]), "gone")
    assert list(registry.policies) == ["fast"]
    registry.block("gone")
    assert (registry.variants(), dict(registry.hosts), dict(registry.policies), registry.plugins) == ([], {}, {}, [])
    registry.register(plugin(variants=[variant()]), "again")


class Entry:
    def __init__(self, name: str, loaded: object) -> None:
        self.name = name
        self.loaded = loaded

    def load(self) -> object:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def test_a_broken_plugin_is_named_in_one_line_and_the_rest_keeps_working(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        Entry("absent", ModuleNotFoundError("No module named 'absent'")),
        Entry("malformed", plugin(variants=["rows"])),
        Entry("sound", plugin(variants=[variant()])),
    ]
    monkeypatch.setattr("lily.registry.entry_points", lambda group: entries)
    registry = Registry()
    registry.load_entry_points()
    assert registry.plugins == ["sound"]
    assert registry.broken == {
        "absent": "plugin absent: ModuleNotFoundError: No module named 'absent'",
        "malformed": "plugin malformed: lily_variants must return KernelVariant objects, not str",
    }


def test_the_built_in_plugin_has_a_cpu_variant_for_every_op() -> None:
    registry = default_registry()
    assert {item.op for item in registry.variants(host="cpu", plugin="lily_builtin")} == set(OPS)
    assert "cpu" in registry.hosts
