"""Policies as people see them: resolved YAML, differences, explanations."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from lily.policy import Difference, Policy, Workload, available, diff, explain, rule_text, to_yaml
from tests.variants import registry, shape_of

BOTH = registry("cpu", "metal")


def load(folder: Path, text: str) -> Policy:
    path = folder / "x.yaml"
    path.write_text(dedent(text), "utf-8")
    return Policy.load(path, BOTH)


class TestToYaml:
    @pytest.mark.parametrize("name", available(BOTH))
    def test_reads_back_as_the_same_policy(self, name: str, tmp_path: Path) -> None:
        policy = Policy.load(name, BOTH)
        again = load(tmp_path, to_yaml(policy))
        assert diff(policy, again) == []
        assert again.name == name
        assert again.extends == ()

    def test_every_line_says_where_it_comes_from(self, tmp_path: Path) -> None:
        policy = load(
            tmp_path,
            """\
            version: 1
            name: "#odd: name"
            extends: m5max
            execution: {threads: 2}
            kernels:
              attention.decode:
                - {when: {phase: [decode], context: ">= 9", gqa_group: [4, 8]}, use: fixed_block, with: {blocks: 32}}
                - use: general
            """,
        )
        lines = to_yaml(policy).splitlines()
        assert lines[:3] == [
            "# x.yaml extends m5max.yaml extends m5.yaml extends apple.yaml",
            "version: 1",
            "name: '#odd: name'",
        ]
        file = tmp_path / "x.yaml"
        assert f"  threads: 2  # {file}:4" in lines
        source = Policy.load("apple", BOTH).sources["execution.snapshot_interval"]
        assert f"  snapshot_interval: 2048  # {source}" in lines
        at = lines.index("  attention.decode:")
        assert lines[at + 1 : at + 3] == [
            "    - {when: {phase: [decode], context: '>= 9', gqa_group: [4, 8]}, use: fixed_block, with: {blocks: 32}}"
            f"  # {file}:7",
            f"    - {{use: general}}  # {file}:8",
        ]
        assert load(tmp_path, to_yaml(policy)).name == "#odd: name"

    def test_a_setting_no_file_gives_is_marked(self) -> None:
        assert "  threads: 0  # default" in to_yaml(Policy.load("m1", BOTH)).splitlines()


class TestDiff:
    def test_an_experiment_of_one_rule(self, tmp_path: Path) -> None:
        text = "version: 1\nextends: m5max\nkernels: {deltanet.scan: [{use: blockwise, with: {block: 64}}]}\n"
        assert diff(Policy.load("m5max", BOTH), load(tmp_path, text)) == [
            Difference("kernels.deltanet.scan", ("{use: direct}",), ("{use: blockwise, with: {block: 64}}",))
        ]

    def test_settings_and_match(self) -> None:
        found = diff(Policy.load("cpu", BOTH), Policy.load("m5max", BOTH))
        by_what = {item.what: (item.left, item.right) for item in found}
        assert by_what["match.host"] == (("cpu",), ("metal",))
        assert by_what["match.gpu_cores"] == ((), ("'>= 24'",))
        assert by_what["execution.kv_dtype"] == (("auto",), ("bf16",))
        assert by_what["kernels.attention.prefill"] == (("{use: flash}",), ("{use: flash, with: {form: tensor}}",))
        assert "execution.encoder" not in by_what
        assert "kernels.attention.decode" not in by_what

    def test_the_same_meaning_in_other_words_is_no_difference(self, tmp_path: Path) -> None:
        text = """\
            version: 1
            extends: cpu
            kernels:
              linear:
                - {when: {phase: [decode]}, use: gemv}
                - {when: {rows: "<= 7"}, use: gemv}
                - {when: {rows: "0..31"}, use: gemm, with: {tile_rows: 16}}
                - {when: {}, use: gemm, with: {tile_rows: 32}}
            """
        assert diff(Policy.load("cpu", BOTH), load(tmp_path, text)) == []


class TestExplain:
    def explain(self, **shape: int) -> list[str]:
        work = Workload("attention.decode", "decode", shape_of("attention.decode", **shape))
        explanation = explain(Policy.load("m5max", BOTH), work)
        chosen = [item.rule for item in explanation.considered if item.outcome == "chosen"]
        assert [explanation.chosen] == chosen
        return [str(item) for item in explanation.considered]

    def test_why_a_rule_does_not_match(self) -> None:
        rules = Policy.load("m5max", BOTH).rules("attention.decode")
        first, second, last = (f"{rule.source}: {rule_text(rule)}" for rule in rules)
        assert self.explain(context=100, head_dim=256, gqa_group=6) == [
            f"{first}: context is 100, not >= 32768; gqa_group is 6, not 8",
            f"{second}: gqa_group is 6, not one of 4, 8, 16",
            f"{last}: chosen",
        ]

    def test_rules_after_the_winner(self) -> None:
        outcomes = [line.rpartition(": ")[2] for line in self.explain(context=32768, head_dim=256, gqa_group=8)]
        assert outcomes == ["chosen", "not reached", "not reached"]
