"""What ``lily plan`` shows: the ops of one step, what does each and what it moves, and the floor that memory sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lily.chips import Chip
from lily.config import ModelConfig
from lily.engine import record_step
from lily.errors import HostError, UsageError
from lily.hosts.meta import MetaHost
from lily.memory import KvPool
from lily.model import StepShape, require_supported
from lily.ops import Phase
from lily.plan import Dispatch, HostCall, OpRecord, Plan, SlotKind, Traffic
from lily.policy import Policy
from lily.recorder import Recorder
from lily.registry import Registry
from lily.weights import ModelWeights, abstract_weights

__all__ = ["OpRow", "PlanReport", "plan_report", "record", "require_variants", "step_shape"]

DEFAULT_CONTEXT = 4096
# What has to come from memory, however large the caches are: activations stay in them.
STREAMED = (SlotKind.WEIGHTS, SlotKind.STATE, SlotKind.KV)


@dataclass(frozen=True)
class OpRow:
    """An op of one or more layers, all of one shape and choice.

    Attributes:
        label: where in a layer, e.g. ``linear_attn.in_proj``.
        layers: indices of the layers; none for what stands outside of them.
        count: how many ops these are; all figures are of all of them.
        rule: ``file:line`` of the policy's rule.
        stages: that begin with a dispatch of these ops; an op whose dispatches all join a stage begun before has 0.
        host_calls: pauses in which the CPU does something.
    """

    label: str
    layers: tuple[int, ...]
    count: int
    op: str
    variant: str
    options: dict[str, object]
    rule: str
    dispatches: int
    stages: int
    host_calls: int
    traffic: Traffic


@dataclass(frozen=True)
class PlanReport:
    """One step, as the engine would run it.

    Attributes:
        model: its name.
        host: kind of host whose variants were recorded.
        scratch_allocated_bytes: what the step's temporaries occupy.
        checkpoint_bytes: of the text model's weights as stored.
        chunk: the policy's ``prefill_chunk``.
    """

    model: str
    policy: str
    host: str
    activation_dtype: str
    kv_dtype: str
    shape: StepShape
    chip: Chip
    ops: tuple[OpRow, ...]
    dispatches: int
    stages: int
    host_calls: int
    traffic: Traffic
    scratch_allocated_bytes: int
    checkpoint_bytes: int
    chunk: int

    @property
    def streamed_bytes(self) -> int:
        """Weights, state and KV, read and written."""
        return sum(map(self.traffic.total, STREAMED))

    @property
    def floor_s(self) -> float:
        """Seconds in which the chip moves these bytes at its nominal bandwidth."""
        return self.streamed_bytes / (self.chip.bandwidth_gb_s * 1e9)

    @property
    def ceiling_tok_s(self) -> float:
        """Tokens a second if memory were the only limit."""
        return self.shape.rows / self.floor_s

    @property
    def recurrent_state(self) -> tuple[int, int]:
        """Bytes of recurrent state read and written."""
        return self._state(lambda row: row.op != "deltanet.prepare")

    @property
    def convolution_state(self) -> tuple[int, int]:
        """Bytes of convolution state read and written."""
        return self._state(lambda row: row.op == "deltanet.prepare")

    def _state(self, of: Callable[[OpRow], bool]) -> tuple[int, int]:
        chosen = [row.traffic for row in self.ops if of(row)]
        return sum(t.read[SlotKind.STATE] for t in chosen), sum(t.written[SlotKind.STATE] for t in chosen)

    @property
    def notes(self) -> list[str]:
        """What a reader may not expect."""
        rows = self.shape.rows
        if self.shape.phase == "prefill" and rows > self.chunk:
            return [
                f"Under this policy the engine reads {rows:,} tokens in {-(-rows // self.chunk)} chunks of at most "
                f"{self.chunk:,} (prefill_chunk); this is one step of {rows:,}."
            ]
        return []


def step_shape(
    config: ModelConfig, name: str, chunk: int, phase: Phase, rows: int | None, context: int | None
) -> StepShape:
    """The step that was asked for; what was left open is one token, or a chunk, in a context of 4,096.

    Args:
        name: the model's, for messages.
        chunk: the policy's ``prefill_chunk``.

    Raises:
        UsageError: these numbers don't go together, or are more than the model was made for.
    """
    limit = config.max_position_embeddings
    for option, value in (("--context", context), ("--rows", rows)):
        if value is not None and value > limit:
            raise UsageError(f"{option} is {value:,}, but {name} was made for {limit:,} tokens")
    if phase == "decode" and rows not in (None, 1):
        raise UsageError(f"a decode step reads one token, so --rows can't be {rows:,}; for a chunk say --phase prefill")
    if context is None:
        context = min(limit, max(DEFAULT_CONTEXT, rows or 0))
    if rows is None:
        rows = 1 if phase == "decode" else min(chunk, context)
    if rows > context:
        raise UsageError(f"--rows is {rows:,} but --context {context:,}; the context counts the step's own tokens too")
    return StepShape(phase, rows, context, "sample")


def require_variants(policy: Policy, registry: Registry) -> None:
    """Refuse a policy whose variants are not all here.

    Raises:
        HostError: says which are missing, and what would work.
    """
    missing = list(dict.fromkeys(f"{item.op}/{item.variant}" for item in policy.missing_variants(registry)))
    if not missing:
        return
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    hosts = list(dict.fromkeys(variant.host for variant in registry.variants()))
    works = f"policies for host {' or '.join(hosts)} work" if hosts else "no plugin here provides any variant"
    if policy.host in hosts:
        works = f"`lily policy check {policy.path}` shows where"
    raise HostError(
        f"policy {policy.name} needs {shown} for host {policy.host}, which no plugin here provides; {works}"
    )


def record(
    weights: ModelWeights, policy: Policy, registry: Registry, shape: StepShape
) -> tuple[Recorder, MetaHost, KvPool]:
    """Record one step on the meta host, in a context just large enough.

    Raises:
        ConfigError: this engine can't run the model.
        PolicyError: a variant does not accept an op.
    """
    require_supported(weights.config)
    factory = registry.hosts.get(policy.host)
    # Without its plugin a host can still be planned for; GPUs keep activations in bf16.
    host = MetaHost(policy.host, "bf16" if factory is None else factory.activation_dtype)
    pool = KvPool(host, weights.config, shape.context, policy.execution.kv_dtype)
    return record_step(weights, host, policy, registry, shape, pool, shape.context), host, pool


def scratch_bytes(recorder: Recorder, config: ModelConfig, shape: StepShape) -> int:
    """Bytes of activations, temporaries and logits of a step."""
    rows = {"all": shape.rows, "last": 1, "sample": 1, "none": 0}[shape.outputs]
    return recorder.activation_bytes + recorder.temporary_bytes + rows * config.vocab_size * 4


def plan_report(
    config: ModelConfig, name: str, policy: Policy, registry: Registry, shape: StepShape, chip: Chip
) -> PlanReport:
    """Record one step of a model, without weights or a device, and count.

    Raises:
        HostError: the policy names variants that are not here.
        ConfigError, PolicyError: see :func:`record`.
    """
    require_variants(policy, registry)
    weights = abstract_weights(config)
    recorder, host, pool = record(weights, policy, registry, shape)
    plan = recorder.plan
    return PlanReport(
        model=name,
        policy=policy.name,
        host=policy.host,
        activation_dtype=host.activation_dtype,
        kv_dtype=pool.dtype,
        shape=shape,
        chip=chip,
        ops=tuple(_collapsed(plan)),
        dispatches=len(plan.dispatches),
        stages=plan.stages,
        host_calls=plan.host_calls,
        traffic=plan.traffic(),
        scratch_allocated_bytes=scratch_bytes(recorder, config, shape),
        checkpoint_bytes=weights.stored_nbytes,
        chunk=policy.execution.prefill_chunk,
    )


def _collapsed(plan: Plan) -> Iterator[OpRow]:
    """Ops in order of their first layer; layers of equal shape and choice in one row."""
    begins = _stage_begins(plan)
    groups: dict[object, list[OpRecord]] = {}
    for made in plan.ops:
        steps = plan.steps[made.first : made.first + made.count]
        traffic = plan.traffic(made.first, made.count)
        key = (
            _place(made.label)[0],
            (made.op, made.variant, made.rule, tuple(made.options.items())),
            # A pause is named after its layer, so its name says nothing of shape.
            tuple(step.kernel if isinstance(step, Dispatch) else None for step in steps),
            (tuple(traffic.read.items()), tuple(traffic.written.items())),
        )
        groups.setdefault(key, []).append(made)
    return (_row(plan, begins, records) for records in groups.values())


def _row(plan: Plan, begins: Sequence[bool], records: Sequence[OpRecord]) -> OpRow:
    first = records[0]
    indices = [i for made in records for i in range(made.first, made.first + made.count)]
    steps = [plan.steps[i] for i in indices]
    layers = [_place(made.label)[1] for made in records]
    return OpRow(
        label=_place(first.label)[0],
        layers=tuple(layer for layer in layers if layer is not None),
        count=len(records),
        op=first.op,
        variant=first.variant,
        options=first.options,
        rule=first.rule,
        dispatches=sum(isinstance(step, Dispatch) for step in steps),
        stages=sum(begins[i] for i in indices),
        host_calls=sum(isinstance(step, HostCall) for step in steps),
        traffic=Traffic.of(access for step in steps for access in step.accesses),
    )


def _stage_begins(plan: Plan) -> list[bool]:
    """For each step, whether it begins a stage; their sum is ``plan.stages``."""
    begins: list[bool] = []
    fresh = True
    for step in plan.steps:
        begins.append(isinstance(step, Dispatch) and (fresh or step.barrier))
        fresh = isinstance(step, HostCall)
    return begins


def _place(label: str) -> tuple[str, int | None]:
    """``layers.3.mlp.route`` as what and in which layer."""
    parts = label.split(".", 2)
    if len(parts) == 3 and parts[0] == "layers" and parts[1].isdecimal():
        return parts[2], int(parts[1])
    return label, None
