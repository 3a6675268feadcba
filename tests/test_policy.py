"""Loading policies, building one on another, and choosing variants."""

from __future__ import annotations

import logging
from pathlib import Path
from textwrap import dedent

import pytest

from lily.errors import PolicyError, UsageError
from lily.ops import OPS
from lily.policy import Execution, MissingVariant, Policy, Workload, auto_policy, available
from tests.variants import make_op, registry, shape_of

CPU = registry("cpu")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(dedent(text), "utf-8")
    return name


class TestFinding:
    def test_shipped_by_name_with_or_without_ending(self) -> None:
        for name in ("m5max", "m5max.yaml"):
            policy = Policy.load(name, CPU)
            assert policy.name == "m5max"
            assert policy.extends == ("m5.yaml", "apple.yaml")
            assert policy.path.parent.name == "policies"

    def test_a_file_here_goes_before_a_shipped_policy(self) -> None:
        write("m5max.yaml", "version: 1\nname: mine\nextends: m5max\n")
        assert Policy.load("m5max.yaml", CPU).name == "mine"
        assert Policy.load("m5max", CPU).name == "m5max"

    def test_a_file_without_ending(self) -> None:
        write("experiment", "version: 1\nextends: cpu\n")
        assert Policy.load("experiment", CPU).name == "experiment"

    def test_path_objects_and_folders(self) -> None:
        write("folder/mine.yaml", "version: 1\nextends: cpu\n")
        assert Policy.load(Path("folder/mine.yaml"), CPU).extends == ("cpu.yaml",)
        assert Policy.load("folder/mine.yaml", CPU).rules("sample")[0].source.startswith("cpu.yaml:")

    def test_plugins_policies(self) -> None:
        path = Path(write("of_plugin/quick.yaml", "version: 1\nextends: cpu\nexecution: {prefill_chunk: 64}\n"))
        with_plugin = registry("cpu", policies=[path])
        assert list(available(with_plugin))[-1] == "quick"
        policy = Policy.load("quick", with_plugin)
        assert policy.execution.prefill_chunk == 64
        assert policy.sources["execution.prefill_chunk"] == "quick.yaml:3"

    def test_a_plugin_can_not_hide_a_shipped_policy(self) -> None:
        path = Path(write("of_plugin/cpu.yaml", "nonsense"))
        assert Policy.load("cpu", registry("cpu", policies=[path])).name == "cpu"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("m5mx", "unknown policy 'm5mx'; did you mean 'm5max'?"),
            ("m5mx.yaml", "there is no file 'm5mx.yaml' here; unknown policy 'm5mx'; did you mean 'm5max'?"),
            ("no/such.yaml", "there is no policy file 'no/such.yaml'"),
            (Path("cpu"), "there is no policy file 'cpu'"),
            (".", "there is no policy file '.'"),
        ],
    )
    def test_not_found(self, name: str, message: str) -> None:
        with pytest.raises(PolicyError) as caught:
            Policy.load(name, CPU)
        assert str(caught.value) == message

    def test_no_near_name_lists_all(self) -> None:
        with pytest.raises(PolicyError, match=r"^unknown policy 'zzzzz'; valid: apple, cpu, m1, .*, m5pro$"):
            Policy.load("zzzzz", CPU)

    def test_unreadable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write("locked.yaml", "version: 1\n")

        def refuse(*args: object, **kwargs: object) -> str:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_text", refuse)
        with pytest.raises(PolicyError, match=r"^policy locked\.yaml can't be read: Permission denied$"):
            Policy.load("locked.yaml", CPU)


class TestExtends:
    def test_settings_merge_by_key_and_rules_replace_by_op(self) -> None:
        write(
            "base.yaml",
            """\
            version: 1
            extends: cpu
            match: {gpu_cores: 4}
            execution: {prefill_chunk: 64, in_flight: 3}
            kernels:
              linear: [{use: gemv}]
              deltanet.scan: [{use: blockwise, with: {block: 32}}]
            """,
        )
        write(
            "child.yaml",
            """\
            version: 1
            extends: base.yaml
            match: {suffix: x}
            execution: {in_flight: 1}
            kernels:
              deltanet.scan: [{use: blockwise}]
            """,
        )
        policy = Policy.load("child.yaml", CPU)
        assert policy.name == "child"  # a name is not inherited
        assert policy.extends == ("base.yaml", "cpu.yaml")
        assert {key: str(condition) for key, condition in policy.match.items()} == {
            "host": "cpu",
            "gpu_cores": "4",
            "suffix": "x",
        }
        assert policy.execution == Execution(prefill_chunk=64, in_flight=1, kv_dtype="auto", snapshot_interval=512)
        assert [rule.source for rule in policy.rules("linear")] == ["base.yaml:6"]
        assert [(rule.source, dict(rule.options)) for rule in policy.rules("deltanet.scan")] == [("child.yaml:6", {})]
        assert policy.rules("moe.route") == Policy.load("cpu", CPU).rules("moe.route")
        assert list(policy.kernels) == list(OPS)
        assert policy.sources["execution.in_flight"] == "child.yaml:4"
        assert policy.sources["execution.prefill_chunk"] == "base.yaml:4"

    def test_paths_are_relative_to_the_file(self) -> None:
        write("a/base.yaml", "version: 1\nextends: cpu.yaml\n")
        write("a/b/child.yaml", "version: 1\nextends: ../base.yaml\n")
        assert Policy.load("a/b/child.yaml", CPU).extends == ("a/b/../base.yaml", "cpu.yaml")

    def test_a_file_beside_goes_before_a_shipped_one(self) -> None:
        write("cpu.yaml", "version: 1\nextends: cpu\nexecution: {threads: 3}\n")
        write("child.yaml", "version: 1\nextends: cpu.yaml\n")
        policy = Policy.load("child.yaml", CPU)
        assert policy.execution.threads == 3
        assert len(policy.extends) == 2

    @pytest.mark.parametrize(
        ("extends", "message"),
        [
            ("cpuu", "x.yaml:2: extends: unknown policy 'cpuu'; did you mean 'cpu'?"),
            ("no/x.yaml", "x.yaml:2: extends: there is no policy file 'no/x.yaml'"),
            ("x.yaml", "x.yaml:2: extends: a policy can't build on itself: x.yaml → x.yaml"),
            ("[cpu]", "x.yaml:2: extends must be a word, not a list"),
        ],
    )
    def test_no_base(self, extends: str, message: str) -> None:
        write("x.yaml", f"version: 1\nextends: {extends}\n")
        with pytest.raises(PolicyError) as caught:
            Policy.load("x.yaml", CPU)
        assert str(caught.value) == message

    def test_circle(self) -> None:
        write("a.yaml", "version: 1\nextends: b.yaml\n")
        write("b.yaml", "version: 1\nname: b\nextends: ./a.yaml\n")
        with pytest.raises(PolicyError) as caught:
            Policy.load("a.yaml", CPU)
        assert str(caught.value) == "b.yaml:3: extends: a policy can't build on itself: a.yaml → b.yaml → a.yaml"

    def test_mistakes_of_the_base_come_first_under_its_own_name(self) -> None:
        write("base.yaml", "version: 1\nextends: cpu\nexecution: {thread: 1}\n")
        write("child.yaml", "version: 2\nextends: base.yaml\n")
        with pytest.raises(PolicyError) as caught:
            Policy.load("child.yaml", CPU)
        assert str(caught.value).splitlines() == [
            "base.yaml:3: unknown setting 'thread' in execution; did you mean 'threads'?",
            "child.yaml:1: version must be 1, not 2",
        ]


class TestChoose:
    def test_first_match_wins_and_options_are_complete(self) -> None:
        policy = Policy.load("cpu", CPU)
        choice = policy.choose(make_op("linear", "prefill", rows=8), "cpu", CPU)
        assert (choice.variant.name, choice.options) == ("gemm", {"tile_rows": 16})
        choice = policy.choose(make_op("linear", "decode", rows=8), "cpu", CPU)
        assert (choice.variant.name, choice.options) == ("gemv", {})
        assert choice.source == choice.rule.source == policy.rules("linear")[0].source

    def test_defaults_of_the_variant_fill_in(self) -> None:
        write("x.yaml", "version: 1\nextends: cpu\nkernels: {deltanet.scan: [{use: blockwise}]}\n")
        work = Workload("deltanet.scan", "prefill", shape_of("deltanet.scan"))
        assert Policy.load("x.yaml", CPU).choose(work, "cpu", CPU).options == {"block": 64}

    def test_a_variant_that_does_not_accept_the_op(self) -> None:
        write("x.yaml", "version: 1\nextends: cpu\nkernels: {attention.decode: [{use: gqa_packed}]}\n")
        policy = Policy.load("x.yaml", CPU)
        with pytest.raises(PolicyError) as caught:
            policy.choose(make_op("attention.decode", "decode", gqa_group=6, heads=12), "cpu", CPU)
        assert str(caught.value) == (
            "x.yaml:3: variant gqa_packed of attention.decode needs groups of a multiple of four query heads, which "
            "layers.3.op is not: attention.decode in decode with rows 1, context 1, heads 12, kv_heads 1, head_dim 1, "
            "gqa_group 6"
        )

    def test_another_host(self) -> None:
        with pytest.raises(PolicyError, match=r"^policy m1 is for host metal, not for host cpu$"):
            Policy.load("m1", CPU).choose(make_op("linear", "decode"), "cpu", CPU)

    def test_a_variant_that_no_plugin_provides(self) -> None:
        with pytest.raises(
            PolicyError,
            match=r"^m1max\.yaml:.*|apple\.yaml:\d+: no plugin here provides variant gemv of linear for host metal$",
        ):
            Policy.load("m1", CPU).choose(make_op("linear", "decode"), "metal", CPU)

    @pytest.mark.parametrize(
        ("name", "phase", "shape", "message"),
        [
            ("linar", "decode", {}, "unknown op 'linar'; did you mean 'linear'?"),
            ("moe.group", "decode", {}, "unknown phase 'decode' of moe.group; valid: prefill"),
            ("embed", "decode", {"row": 1}, "unknown shape key 'row' of embed; did you mean 'rows'?"),
            ("embed", "decode", {"rows": 1}, "the shape of embed also needs hidden, bits"),
        ],
    )
    def test_workloads_are_checked(self, name: str, phase: str, shape: dict[str, int], message: str) -> None:
        with pytest.raises(UsageError) as caught:
            Workload(name, phase, shape)
        assert str(caught.value) == message


class TestMissingVariants:
    def test_a_host_without_any_variants(self) -> None:
        missing = Policy.load("m5max", CPU).missing_variants(CPU)
        assert missing[0].op == "embed"
        assert missing[0].variant == "rows"
        assert missing[0].source.startswith("apple.yaml:")
        assert any(item.source.startswith("m5.yaml:") for item in missing)
        assert len(missing) == sum(map(len, Policy.load("m5max", CPU).kernels.values()))
        assert isinstance(missing[0], MissingVariant)

    def test_nothing_is_missing_with_the_plugin(self) -> None:
        both = registry("cpu", "metal")
        assert Policy.load("m5max", both).missing_variants(both) == []
        assert Policy.load("cpu", CPU).missing_variants(CPU) == []


def test_breakpoints_are_the_first_values_of_another_answer() -> None:
    write(
        "x.yaml",
        """\
        version: 1
        extends: cpu
        kernels:
          attention.decode:
            - {when: {context: "< 100"}, use: general}
            - {when: {context: "> 5000"}, use: fixed_block}
            - {when: {context: "200..300"}, use: general}
            - {when: {context: [400, 402]}, use: general}
            - {use: gqa_packed}
          attention.prefill:
            - {when: {context: "<= 49"}, use: flash}
            - {when: {context: ">= 1", rows: 7}, use: flash}
            - {use: flash}
        """,
    )
    policy = Policy.load("x.yaml", CPU)
    assert policy.breakpoints("context") == [50, 100, 200, 301, 400, 401, 402, 403, 5001]
    assert policy.breakpoints("rows") == [7, 8, 32]
    assert policy.breakpoints("heads") == []


class TestAuto:
    def test_most_specific_match_wins(self) -> None:
        identity: dict[str, int | str] = {"host": "metal", "generation": 17, "suffix": "s", "gpu_cores": 40}
        assert auto_policy(CPU, identity).name == "m5max"
        assert auto_policy(CPU, {"host": "metal"}).name == "apple"
        assert auto_policy(CPU, {**identity, "generation": 18}).name == "apple"
        assert auto_policy(CPU, {"host": "cpu"}).name == "cpu"

    def test_nothing_matches(self) -> None:
        with pytest.raises(PolicyError) as caught:
            auto_policy(CPU, {"host": "cuda", "generation": 90})
        assert str(caught.value).startswith(
            "no policy matches this device (host cuda, generation 90); choose one of apple,"
        )

    def test_a_plugins_policy_takes_part(self) -> None:
        path = Path(write("p/many_cores.yaml", 'version: 1\nextends: cpu\nmatch: {gpu_cores: ">= 64"}\n'))
        with_plugin = registry("cpu", policies=[path])
        assert auto_policy(with_plugin, {"host": "cpu", "gpu_cores": 96}).name == "many_cores"
        assert auto_policy(with_plugin, {"host": "cpu", "gpu_cores": 8}).name == "cpu"

    def test_a_plugins_broken_policy_is_named_and_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        path = Path(write("p/broken.yaml", "version: 1\nkernel: {}\n"))
        with caplog.at_level(logging.WARNING):
            assert auto_policy(registry("cpu", policies=[path]), {"host": "cpu"}).name == "cpu"
        assert caplog.messages == [
            "policy broken of a plugin is left out: broken.yaml:2: unknown key 'kernel'; did you mean 'kernels'?"
        ]
