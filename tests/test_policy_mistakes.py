"""Every mistake a policy file can have, and the words it is reported in."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from lily.errors import PolicyError
from lily.ops import OPS
from lily.policy import Policy
from tests.variants import registry

CPU = registry("cpu")
HEAD = "version: 1\nextends: cpu\n"


def mistakes(folder: Path, text: str | bytes) -> list[str]:
    """The lines of the error that loading ``text`` as x.yaml gives."""
    path = folder / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PolicyError) as caught:
        Policy.load(path, CPU)
    return str(caught.value).replace(str(path), "x.yaml").splitlines()


GOLDEN: dict[str, tuple[str | bytes, str]] = {
    # The file
    "empty": ("", "1: the file is empty; a policy starts with version: 1"),
    "only a comment": ("# nothing\n", "1: the file is empty; a policy starts with version: 1"),
    "not a mapping": ("- 1\n", "1: a policy must be a mapping, not a list"),
    "a word": ("policy\n", "1: a policy must be a mapping, not 'policy'"),
    "not utf-8": (b"version: 1\nname: \xff\n", "2: not UTF-8 text"),
    "control character": ("version: 1\nname: \x07\n", "2: not YAML: character '\\x07' is not allowed"),
    "nested deeply": ("[" * 1200, "1: not a policy: nested too deeply"),
    "unclosed": (
        "version: 1\nmatch: {host: cpu\n",
        "3: not YAML, column 1: expected ',' or '}', but got '<stream end>'",
    ),
    "tab": (
        "version: 1\nmatch:\n\thost: cpu\n",
        "3: not YAML, column 1: found character '\\t' that cannot start any token",
    ),
    "two documents": ("version: 1\n---\nversion: 1\n", "2: not YAML, column 1: but found another document"),
    "unquoted comparison": (
        HEAD + "kernels:\n  linear:\n    - use: gemv\n      when:\n        rows: >= 8\n",
        "7: not YAML, column 16: expected chomping or indentation indicators, but found '='; "
        "put a comparison in quotes",
    ),
    # Top keys
    "no version": ("name: x\nextends: cpu\n", "1: version is missing; write version: 1"),
    "wrong version": ("version: 2\nextends: cpu\n", "1: version must be 1, not 2"),
    "version in quotes": ("version: '1'\nextends: cpu\n", "1: version must be 1, not '1'"),
    "unknown key": (HEAD + "kernel: {}\n", "3: unknown key 'kernel'; did you mean 'kernels'?"),
    "key far off": (
        HEAD + "zzz: {}\n",
        "3: unknown key 'zzz'; valid: version, name, extends, match, execution, kernels",
    ),
    "merge key": (HEAD + "<<: {}\n", "3: unknown key '<<'; valid: version, name, extends, match, execution, kernels"),
    "key twice": (HEAD + "name: a\nname: b\n", "4: key 'name' of a policy is given twice, first on line 3"),
    "list as a key": (HEAD + "[1]: 2\n", "3: a key of a policy must be a word, not a list"),
    "name no word": (HEAD + "name: [a]\n", "3: name must be a word, not a list"),
    "name empty": (HEAD + "name:\n", "3: name must be a word, not nothing"),
    "name not printable": (HEAD + 'name: "a\\nb"\n', "3: name must be printable, not 'a\\nb'"),
    "match no mapping": (HEAD + "match: cpu\n", "3: match must be a mapping, not 'cpu'"),
    "no rules and no base": (
        "version: 1\nkernels:\n  embed: [{use: rows}]\n",
        f"2: no rules for {', '.join(op for op in OPS if op != 'embed')}; every op needs some, "
        "here or in a policy that this one extends",
    ),
    # match
    "match key": (HEAD + "match: {gpu_core: 8}\n", "3: unknown key 'gpu_core' in match; did you mean 'gpu_cores'?"),
    "two hosts": (HEAD + "match: {host: [cpu, metal]}\n", "3: match.host must be one host, not a list"),
    "suffix a number": (HEAD + "match: {suffix: 7}\n", "3: match.suffix must be a word, not 7"),
    "generation a word": (
        HEAD + "match: {generation: m5}\n",
        "3: match.generation can't be compared with 'm5': "
        'write 8, [4, 8], "< 48", ">= 48" or "16..64" (both ends included)',
    ),
    "match never": (HEAD + 'match: {gpu_cores: "9..8"}\n', "3: match.gpu_cores is never 9..8"),
    # execution
    "setting": (
        HEAD + "execution:\n  prefil_chunk: 8\n",
        "4: unknown setting 'prefil_chunk' in execution; did you mean 'prefill_chunk'?",
    ),
    "setting too large": (
        HEAD + "execution: {in_flight: 5}\n",
        "3: in_flight must be a whole number from 1 to 4, not 5",
    ),
    "setting no number": (
        HEAD + "execution: {threads: many}\n",
        "3: threads must be a whole number from 0 to 1024, not 'many'",
    ),
    "setting a fraction": (
        HEAD + "execution: {prefill_chunk: 0.5}\n",
        "3: prefill_chunk must be a whole number from 1 to 65536, not 0.5",
    ),
    "setting octal": (
        HEAD + "execution: {threads: 010}\n",
        "3: threads must be a whole number from 0 to 1024, not 010",
    ),
    "setting a truth value": (
        HEAD + "execution: {threads: true}\n",
        "3: threads must be a whole number from 0 to 1024, not true",
    ),
    "setting in quotes": (
        HEAD + "execution: {threads: '4'}\n",
        "3: threads must be a whole number from 0 to 1024, not '4'",
    ),
    "setting a choice": (
        HEAD + "execution: {encoder: parallel}\n",
        "3: encoder must be concurrent or serial, not 'parallel'",
    ),
    "setting a list": (HEAD + "execution: {kv_dtype: [f32]}\n", "3: kv_dtype must be bf16 or f32 or auto, not a list"),
    # kernels
    "op": (
        HEAD + "kernels:\n  deltanet.scn: [{use: direct}]\n",
        "4: unknown op 'deltanet.scn' in kernels; did you mean 'deltanet.scan'?",
    ),
    "op in capitals": (
        HEAD + "kernels:\n  MoE.Route: [{use: fused}]\n",
        "4: unknown op 'MoE.Route' in kernels; did you mean 'moe.route'?",
    ),
    "op twice": (
        HEAD + "kernels:\n  embed: [{use: rows}]\n  embed: [{use: rows}]\n",
        "5: key 'embed' of kernels is given twice, first on line 4",
    ),
    "rules no list": (HEAD + "kernels:\n  embed: {use: rows}\n", "4: the rules of embed must be a list, not a mapping"),
    "no rules": (HEAD + "kernels:\n  embed: []\n", "4: the rules of embed must not be an empty list"),
    "rule no mapping": (HEAD + "kernels:\n  embed: [rows]\n", "4: a rule of embed must be a mapping, not 'rows'"),
    "rule key": (
        HEAD + "kernels:\n  embed:\n    - use: rows\n      wiht: {}\n",
        "6: unknown key 'wiht' in a rule of embed; did you mean 'with'?",
    ),
    "no use": (HEAD + "kernels:\n  embed: [{with: {}}]\n", "4: a rule of embed must say which variant to use"),
    "use no word": (HEAD + "kernels:\n  embed: [{use: 1}]\n", "4: use of a rule of embed must be a word, not 1"),
    "use no name": (
        HEAD + "kernels:\n  embed: [{use: the rows}]\n",
        "4: use of a rule of embed must be a variant's name, not 'the rows'",
    ),
    "variant": (
        HEAD + "kernels:\n  deltanet.scan:\n    - with: {}\n      use: dircet\n",
        "6: unknown variant 'dircet' of deltanet.scan on host cpu; did you mean 'direct'?",
    ),
    "with no mapping": (
        HEAD + "kernels:\n  embed: [{use: rows, with: 3}]\n",
        "4: with of a rule of embed must be a mapping, not 3",
    ),
    "option": (
        HEAD + "kernels:\n  deltanet.scan: [{use: blockwise, with: {blok: 32}}]\n",
        "4: unknown option 'blok' of deltanet.scan/blockwise; did you mean 'block'?",
    ),
    "option of a variant without": (
        HEAD + "kernels:\n  deltanet.scan: [{use: direct, with: {block: 32}}]\n",
        "4: unknown option 'block' of deltanet.scan/direct; it takes none",
    ),
    "option value": (
        HEAD + "kernels:\n  deltanet.scan: [{use: blockwise, with: {block: 48}}]\n",
        "4: option block of deltanet.scan/blockwise must be 64 or 32, not 48",
    ),
    "option value in quotes": (
        HEAD + "kernels:\n  deltanet.scan: [{use: blockwise, with: {block: '32'}}]\n",
        "4: option block of deltanet.scan/blockwise must be 64 or 32, not '32'",
    ),
    "option a list": (
        HEAD + "kernels:\n  deltanet.scan: [{use: blockwise, with: {block: [32]}}]\n",
        "4: option 'block' must be a number or a word, not a list",
    ),
    # when
    "when no mapping": (
        HEAD + "kernels:\n  embed: [{when: decode, use: rows}]\n",
        "4: when of a rule of embed must be a mapping, not 'decode'",
    ),
    "shape key": (
        HEAD + 'kernels:\n  attention.decode: [{when: {contxt: "< 8"}, use: general}, {use: general}]\n',
        "4: unknown shape key 'contxt' of attention.decode; did you mean 'context'?",
    ),
    "shape key of another op": (
        HEAD + "kernels:\n  embed: [{when: {context: 8}, use: rows}, {use: rows}]\n",
        "4: unknown shape key 'context' of embed; valid: phase, rows, hidden, bits",
    ),
    "phase": (
        HEAD + "kernels:\n  embed: [{when: {phase: decoding}, use: rows}, {use: rows}]\n",
        "4: unknown phase 'decoding'; did you mean 'decode'?",
    ),
    "comparison": (
        HEAD + 'kernels:\n  embed: [{when: {rows: "=< 8"}, use: rows}, {use: rows}]\n',
        '4: rows can\'t be compared with \'=< 8\': write 8, [4, 8], "< 48", ">= 48" or "16..64" (both ends included)',
    ),
    "comparison in a list": (
        HEAD + 'kernels:\n  embed: [{when: {rows: [4, "> 8"]}, use: rows}, {use: rows}]\n',
        '4: rows can\'t be compared with \'> 8\': write 8, [4, 8], "< 48", ">= 48" or "16..64" (both ends included)',
    ),
    "negative": (
        HEAD + "kernels:\n  embed: [{when: {rows: -1}, use: rows}, {use: rows}]\n",
        '4: rows can\'t be compared with -1: write 8, [4, 8], "< 48", ">= 48" or "16..64" (both ends included)',
    ),
    "empty list": (
        HEAD + "kernels:\n  embed: [{when: {rows: []}, use: rows}, {use: rows}]\n",
        "4: rows must not be an empty list",
    ),
    # Rules that can't match, workloads that none matches
    "below the least": (
        HEAD + 'kernels:\n  embed: [{when: {rows: "< 1"}, use: rows}, {use: rows}]\n',
        "4: this rule of embed can never match: rows is never < 1",
    ),
    "empty range": (
        HEAD + 'kernels:\n  embed: [{when: {rows: "9..8"}, use: rows}, {use: rows}]\n',
        "4: this rule of embed can never match: rows is never 9..8",
    ),
    "phase the op lacks": (
        HEAD + "kernels:\n  moe.group: [{when: {phase: decode}, use: device}, {use: device}]\n",
        "4: this rule of moe.group can never match: phase is never decode",
    ),
    "after everything": (
        HEAD + "kernels:\n  embed:\n    - {use: rows}\n    - {when: {rows: 8}, use: rows}\n",
        "6: this rule of embed can never match: the rule on line 5 has no when and takes everything",
    ),
    "implied": (
        HEAD
        + 'kernels:\n  embed:\n    - {when: {rows: ">= 8"}, use: rows}\n'
        + '    - {when: {rows: "> 8", bits: 4}, use: rows}\n    - {use: rows}\n',
        "6: this rule of embed can never match: the rule on line 5 takes all that it would",
    ),
    "union": (
        HEAD
        + 'kernels:\n  embed:\n    - {when: {rows: "<= 8"}, use: rows}\n    - {when: {rows: "> 8"}, use: rows}\n'
        + "    - {use: rows}\n",
        "7: this rule of embed can never match: the rules before it take all that it would",
    ),
    "both phases": (
        HEAD
        + "kernels:\n  embed:\n    - {when: {phase: decode}, use: rows}\n    - {when: {phase: prefill}, use: rows}\n"
        + "    - {when: {rows: 7}, use: rows}\n",
        "7: this rule of embed can never match: the rules before it take all that it would",
    ),
    "two keys together": (
        HEAD
        + 'kernels:\n  embed:\n    - {when: {rows: "< 8", bits: "< 5"}, use: rows}\n'
        + '    - {when: {rows: ">= 8"}, use: rows}\n    - {when: {bits: 8}, use: rows}\n'
        + "    - {when: {bits: [4, 8]}, use: rows}\n    - {use: rows}\n",
        "8: this rule of embed can never match: the rules before it take all that it would",
    ),
    "not covered": (
        HEAD + 'kernels:\n  embed:\n    - {when: {phase: decode}, use: rows}\n    - {when: {rows: "< 8"}, use: rows}\n',
        "6: no rule of embed matches where phase is prefill, rows is 8 and more; end with a rule that has no when",
    ),
    "a hole": (
        HEAD + 'kernels:\n  embed: [{when: {rows: "< 8"}, use: rows}, {when: {rows: "> 8"}, use: rows}]\n',
        "4: no rule of embed matches where rows is 8; end with a rule that has no when",
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_one_mistake(case: str, tmp_path: Path) -> None:
    text, message = GOLDEN[case]
    assert mistakes(tmp_path, text) == [f"x.yaml:{message}"]


def test_what_covers_everything_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        HEAD
        + dedent("""\
        kernels:
          embed:
            - {when: {rows: "< 8"}, use: rows}
            - {when: {rows: "8..9"}, use: rows}
            - {when: {rows: 10}, use: rows}
            - {when: {rows: ">= 11", phase: [decode]}, use: rows}
            - {when: {phase: prefill}, use: rows}
          moe.experts_in:
            - {when: {rows_per_expert: 0}, use: gemv_fused}
            - {when: {rows_per_expert: ">= 1"}, use: grouped}
        """)
    )
    assert len(Policy.load(path, CPU).rules("embed")) == 5


def test_all_mistakes_at_once_in_order(tmp_path: Path) -> None:
    text = """\
        version: 3
        extends: cpu
        extend: 1
        execution: {in_flight: 0, encoder: serial, therads: 2}
        kernels:
          sampel: [{use: device}]
          linear:
            - {when: {phase: decode, row: 3}, use: gemw}
            - {use: gemm, with: {tile: 16}}
            - {when: {rows: 3}, use: gemv}
            - {wen: {}, use: gemv}
          deltanet.scan:
            - {when: {rows: 64}, use: direct}
        """
    assert mistakes(tmp_path, dedent(text)) == [
        "x.yaml:1: version must be 1, not 3",
        "x.yaml:3: unknown key 'extend'; did you mean 'extends'?",
        "x.yaml:4: unknown setting 'therads' in execution; did you mean 'threads'?",
        "x.yaml:4: in_flight must be a whole number from 1 to 4, not 0",
        "x.yaml:6: unknown op 'sampel' in kernels; did you mean 'sample'?",
        "x.yaml:8: unknown shape key 'row' of linear; did you mean 'rows'?",
        "x.yaml:8: unknown variant 'gemw' of linear on host cpu; did you mean 'gemv'?",
        "x.yaml:9: unknown option 'tile' of linear/gemm; did you mean 'tile_rows'?",
        "x.yaml:10: this rule of linear can never match: the rule on line 9 has no when and takes everything",
        "x.yaml:11: unknown key 'wen' in a rule of linear; did you mean 'when'?",
        "x.yaml:13: no rule of deltanet.scan matches where rows is 1..63 or 65 and more; "
        "end with a rule that has no when",
    ]


def test_an_op_without_variants_on_a_host_that_has_some(tmp_path: Path) -> None:
    partial = registry("cpu", "metal")
    for variant in partial.variants(op="moe.group", host="cpu"):
        del partial._variants[variant.key]
    path = tmp_path / "x.yaml"
    path.write_text("version: 1\nextends: cpu\nkernels:\n  moe.group: [{use: device}]\n")
    with pytest.raises(PolicyError) as caught:
        Policy.load(path, partial)
    assert str(caught.value) == f"{path}:4: unknown variant 'device' of moe.group on host cpu; no plugin provides one"


def test_a_host_without_variants_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("version: 1\nextends: m5max\nkernels:\n  deltanet.scan: [{use: whatever, with: {x: on, y: 3}}]\n")
    rule = Policy.load(path, CPU).rules("deltanet.scan")[0]
    assert rule.options == {"x": "on", "y": 3}  # YAML 1.1 would make a truth value of "on"


def test_rules_of_a_base_that_are_replaced_need_no_variants(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text("version: 1\nextends: cpu\nkernels: {moe.route: [{use: not_here}]}\n")
    child = tmp_path / "child.yaml"
    child.write_text("version: 1\nextends: base.yaml\nkernels: {moe.route: [{use: split}]}\n")
    assert Policy.load(child, CPU).rules("moe.route")[0].use == "split"
    with pytest.raises(PolicyError, match="unknown variant 'not_here'"):
        Policy.load(path, CPU)


def test_without_the_fast_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    path = tmp_path / "x.yaml"
    path.write_text(HEAD + "execution: {threads: 3}\n")
    assert Policy.load(path, CPU).sources["execution.threads"] == f"{path}:3"
    assert mistakes(tmp_path, HEAD + "- 1\n")[0].startswith("x.yaml:3: not YAML, column 1: ")


def test_a_shared_node_is_reported_once_a_line(tmp_path: Path) -> None:
    text = HEAD + "kernels:\n  linear: &rules [{use: gemv, with: {a: []}}]\n  logits: *rules\n"
    found = mistakes(tmp_path, text)
    assert found == ["x.yaml:4: option 'a' must be a number or a word, not a list"]


def test_a_shared_condition_is_reported_once_and_has_no_consequences(tmp_path: Path) -> None:
    rule = "- {when: *when, use: gemv}\n"
    text = (
        HEAD
        + f'kernels:\n  logits:\n    - {{when: &when {{rows: "=< 8"}}, use: gemv}}\n    {rule}  linear:\n    {rule}'
    )
    found = mistakes(tmp_path, text)
    assert [line.partition(":")[2].partition(" ")[0] for line in found] == ["5:"]
