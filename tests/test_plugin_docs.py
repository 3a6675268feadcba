"""docs/plugins.md against the code: its table of ops is that of ``lily.ops.OPS``, its example that of the plugin.

``python -m tests.test_plugin_docs`` writes the table anew.
"""

from __future__ import annotations

import re

from lily.ops import OPS
from lily.registry import PluginSpec
from tests.environments import ROOT

PAGE = ROOT / "docs" / "plugins.md"
EXAMPLE = ROOT / "plugins" / "lily_example" / "lily_example"
FIRST = next(iter(OPS))


def table_of_ops() -> str:
    """The page from the first op on."""
    sections = []
    for spec in OPS.values():
        rows = [f"| `{role}` | {text} |" for role, text in spec.operands.items()]
        rows += [f"| `{name}` (number) | {text} |" for name, text in spec.params.items()]
        head = f"### `{spec.name}`\n\n{', '.join(spec.phases)}: {spec.summary}\n\n| operand | what it is |\n|---|---|\n"
        sections.append(head + "\n".join(rows) + "\n")
    return "\n".join(sections)


def split_page() -> tuple[str, str]:
    text, mark, ops = PAGE.read_text("utf-8").partition(f"### `{FIRST}`\n")
    return text, mark + ops


def test_the_table_is_that_of_the_code() -> None:
    assert split_page()[1] == table_of_ops()


def test_every_hook_is_explained() -> None:
    hooks = {name for name in vars(PluginSpec) if name.startswith("lily_")}
    assert hooks == set(re.findall(r"^\| `(lily_\w+)\(", split_page()[0], re.MULTILINE))


def test_the_example_is_what_the_plugin_says() -> None:
    """Each line of the page's Python, comments and dots aside, is a line of the plugin; so is each of its C++ table."""
    source = (EXAMPLE / "__init__.py").read_text("utf-8")
    lines = {line.strip() for line in source.splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", split_page()[0], re.DOTALL)
    assert len(blocks) == 2
    for line in "\n".join(blocks).splitlines():
        code = re.sub(r"\s{2,}#.*", "", line).strip()
        assert code in {"...", "KernelVariant("} | lines


if __name__ == "__main__":
    PAGE.write_text(split_page()[0] + table_of_ops(), "utf-8")
