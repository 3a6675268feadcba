"""How near decode comes to the memory's speed: tokens a second against bytes a token over measured read bandwidth.

    python tools/decode_bound.py MODEL [--context 128] [--steps 24] [--rounds 5] [--threads N] [--policy P]

Both are measured in this process with the same threads, in alternating rounds: a plain loop over the model's own mapped
weights (tools/read_loop.cc, compiled on the spot), and decode steps after a synthetic prompt. Medians and range are
printed. The bytes a token are those of the plan: weights, state and KV read and written.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

import lily
from lily.catalog import find_model
from lily.checkpoint import Checkpoint
from lily.config import load_config
from lily.engine import Engine, record_step
from lily.hosts.cpu import CpuHost
from lily.hosts.opening import choose_policy
from lily.model import StepShape
from lily.plan import Plan, Slot, SlotKind, View, read, write
from lily.registry import default_registry
from lily.weights import load_weights

CHUNK = 1 << 20


def read_library(folder: Path) -> Path:
    """Compile the read loop for this machine."""
    target = folder / "read_loop.so"
    source = Path(__file__).with_name("read_loop.cc")
    compiler = os.environ.get("CXX", "c++").split()
    flags = ["-std=c++20", "-O3", "-march=native", "-Wno-psabi", "-fPIC", "-shared", f"-I{lily.get_include()}"]
    subprocess.run([*compiler, *flags, str(source), "-o", str(target)], check=True)
    return target


class ReadLoop:
    """Reads one source once a call."""

    def __init__(self, host: CpuHost, source: np.ndarray) -> None:
        self._host = host
        self.nbytes = source.nbytes
        chunks = -(-source.nbytes // CHUNK)
        data, out = Slot(0, SlotKind.WEIGHTS, "data"), Slot(1, SlotKind.SCRATCH, "out")
        plan = Plan()
        accesses = [read(View(data, 0, source.nbytes)), write(View(out, 0, 8 * chunks))]
        plan.dispatch("read_loop", accesses, tasks=chunks, threads=4)
        self._prepared = host.prepare(plan)
        self._buffers = [host.bind(source, "data"), host.allocate(8 * chunks, "out")]

    def seconds(self) -> float:
        started = time.perf_counter()
        self._host.submit(self._prepared, self._buffers).wait()
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()

    found = find_model(options.model, weights=True)
    assert found.weights is not None
    registry = default_registry()
    policy = choose_policy(options.policy, "cpu", registry)
    config = load_config(found.path)
    weights = load_weights(Checkpoint.open(found.weights), config)
    with tempfile.TemporaryDirectory() as folder:
        host = CpuHost(threads=options.threads or policy.execution.threads, libraries=[read_library(Path(folder))])
    limit = options.context + options.steps + 8
    engine = Engine(weights, host, policy, registry, max_context=limit)
    shape = StepShape("decode", 1, options.context, "sample")
    traffic = record_step(weights, host, policy, registry, shape, engine.pool, limit).plan.traffic()
    token_bytes = sum(traffic.total(kind) for kind in (SlotKind.WEIGHTS, SlotKind.STATE, SlotKind.KV))
    loops = [ReadLoop(host, source) for source in weights.sources]

    def bandwidth() -> float:
        return sum(loop.nbytes for loop in loops) / sum(loop.seconds() for loop in loops)

    session = engine.session()
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, config.vocab_size, options.context).tolist()
    engine.read(session, prompt)
    start = session.snapshot()

    def tokens_per_second() -> float:
        session.restore(start)
        steps = engine.generate(session, [prompt[-1]], max_tokens=options.steps + 1)
        next(steps)
        started = time.perf_counter()
        count = sum(1 for _ in steps)
        return count / (time.perf_counter() - started)

    bandwidth(), tokens_per_second()  # warm: pages touched, plans recorded
    rates, bands = [], []
    for turn in range(options.rounds):
        for measure, kept in ((bandwidth, bands), (tokens_per_second, rates))[:: 1 if turn % 2 else -1]:
            kept.append(measure())
    shares = [rate * token_bytes / band for rate, band in zip(rates, bands, strict=True)]
    print(f"{found.name}: {host.description}, policy {policy.name}, context {options.context}")
    print(f"bytes a token      {token_bytes / 1e6:10.1f} MB")
    for what, values, unit in (
        ("read bandwidth", [band / 1e9 for band in bands], "GB/s"),
        ("decode", rates, "tok/s"),
        ("share of the bound", [100 * share for share in shares], "%"),
    ):
        print(
            f"{what:18} {median(values):10.2f} {unit:5} ({min(values):.2f} to {max(values):.2f}, {len(values)} rounds)"
        )


if __name__ == "__main__":
    main()
