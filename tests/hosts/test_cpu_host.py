"""The CPU host: queue, threads, memory, and what a broken plan or request comes to."""

from __future__ import annotations

import _thread
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lily import _cpu
from lily.errors import HostError, UsageError
from lily.hosts.cpu import CpuHost, choose_isa
from lily.hosts.meta import MetaHost
from lily.plan import Plan, Slot, SlotKind, View, read, update, write
from tests.native import library

SLOT = Slot(0, SlotKind.SCRATCH, "data")

# add: every element of buffer 1 becomes that of buffer 0 plus a constant; slow: sleeps a millisecond a task.
SOURCE = r"""
#include <chrono>
#include <thread>
#include "abi.h"
namespace {
void add(const lily::Call& call, uint32_t begin, uint32_t end, lily::Worker&) {
  const int32_t amount = call.constants<int32_t>();
  const int32_t* from = call.at<const int32_t>(0, call.tasks);
  int32_t* to = call.at<int32_t>(1, call.tasks);
  for (uint32_t i = begin; i < end; ++i) to[i] = from[i] + amount;
}
void slow(const lily::Call& call, uint32_t begin, uint32_t end, lily::Worker& worker) {
  int32_t* done = call.at<int32_t>(0, call.tasks);
  int32_t* mine = worker.take<int32_t>(call, 0, 1);
  if (worker.first_entry(call)) *mine = 0;
  for (uint32_t i = begin; i < end; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    done[i] = ++*mine;
  }
}
const lily::Kernel kKernels[] = {{"test_add", add, 2, sizeof(int32_t)}, {"test_slow", slow, 1, 0}};
const lily::KernelTable kTable{lily::kAbiVersion, 2, kKernels};
}  // namespace
LILY_EXPORT_KERNELS(kTable)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library(SOURCE, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=[1, 2, 5])
def host(request: pytest.FixtureRequest, kernels: Path) -> Iterator[CpuHost]:
    opened = CpuHost(threads=request.param, libraries=[kernels])
    yield opened
    opened.close()


def words(first: int, count: int) -> View:
    return View(SLOT, 4 * first, 4 * count)


def add(plan: Plan, source: View, target: View, amount: int, grain: int = 3) -> None:
    tasks = target.nbytes // 4
    plan.dispatch(
        "test_add", [read(source), write(target)], constants=struct.pack("<i", amount), tasks=tasks, threads=grain
    )


def test_stages_run_in_order_and_every_task_once(host: CpuHost) -> None:
    plan = Plan()
    for step in range(40):
        half = step % 2
        add(plan, words(100 * half, 100), words(100 * (1 - half), 100), 1)
    prepared = host.prepare(plan)
    buffer = host.allocate(800, "data")
    for run in range(1, 30):
        host.submit(prepared, [buffer]).wait()
        assert set(host.read(buffer, 0, "<i4", 100)) == {40 * run}


def test_runs_are_queued_in_order(host: CpuHost) -> None:
    plan = Plan()
    add(plan, words(0, 64), words(0, 64), 1)
    prepared = host.prepare(plan)
    buffer = host.allocate(256, "data")
    tickets = [host.submit(prepared, [buffer]) for _ in range(50)]
    for ticket in reversed(tickets):
        ticket.wait()
    assert set(host.read(buffer, 0, "<i4", 64)) == {50}


def test_a_host_call_pauses_the_plan_between_dispatches(host: CpuHost) -> None:
    plan = Plan()
    add(plan, words(0, 8), words(8, 8), 5)

    def double(memory: Any) -> None:
        memory.array(words(8, 8), "<i4")[:] *= 2

    plan.host_call("double", double, [update(words(8, 8))])
    add(plan, words(8, 8), words(0, 8), 1)
    buffer = host.allocate(64, "data")
    host.submit(host.prepare(plan), [buffer]).wait()
    assert host.read(buffer, 0, "<i4", 16).tolist() == [11] * 8 + [10] * 8


def test_worker_scratch_lasts_through_one_dispatch(host: CpuHost) -> None:
    plan = Plan()
    plan.dispatch("test_slow", [write(words(0, 8))], tasks=8, worker_bytes=64)
    buffer = host.allocate(64, "data")
    prepared = host.prepare(plan)
    for _ in range(2):
        host.submit(prepared, [buffer]).wait()
        done = host.read(buffer, 0, "<i4", 8)
        assert done.min() == 1
        assert sorted(done)[-1] >= -(-8 // host.threads)


def test_ctrl_c_ends_a_long_run_within_a_second_and_the_host_goes_on(host: CpuHost) -> None:
    plan = Plan()
    plan.dispatch("test_slow", [write(words(0, 200_000))], tasks=200_000, worker_bytes=64)
    buffer = host.allocate(800_000, "data")
    ticket = host.submit(host.prepare(plan), [buffer])
    queued = host.submit(host.prepare(plan), [buffer])
    threading.Timer(0.2, _thread.interrupt_main).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    # 200 s of work are left; the bound is of behaviour, not of speed.
    assert time.monotonic() - started < 1.2
    with pytest.raises(HostError, match="cancelled"):
        queued.wait()
    short = Plan()
    add(short, words(0, 8), words(8, 8), 1)
    host.submit(host.prepare(short), [buffer]).wait()


def test_an_uninterruptible_wait_finishes_first(kernels: Path) -> None:
    host = CpuHost(threads=2, libraries=[kernels])
    plan = Plan()
    plan.dispatch("test_slow", [write(words(0, 300))], tasks=300, worker_bytes=64)
    buffer = host.allocate(1200, "data")
    ticket = host.submit(host.prepare(plan), [buffer])
    threading.Timer(0.05, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 — the signal comes through after the wait
        ticket.wait(interruptible=False)
        time.sleep(1)
    assert host.read(buffer, 0, "<i4", 300).min() >= 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda plan: plan.dispatch("no_such", [], tasks=1), "no kernel called no_such"),
        (lambda plan: plan.dispatch("test_add", [read(words(0, 1))], tasks=1), "test_add takes 2 buffers, not 1"),
        (
            lambda plan: plan.dispatch("test_add", [read(words(0, 1)), write(words(1, 1))], constants=b"12", tasks=1),
            "test_add takes 4 bytes of constants, not 2",
        ),
        (lambda plan: plan.dispatch("test_slow", [write(words(0, 1))], tasks=(65536, 65536, 2)), "too many tasks"),
    ],
)
def test_a_plan_the_kernels_can_not_run_is_refused(kernels: Path, record: Any, message: str) -> None:
    host = CpuHost(threads=1, libraries=[kernels])
    plan = Plan()
    record(plan)
    with pytest.raises(HostError, match=message):
        host.prepare(plan)


def test_a_buffer_that_is_too_small_is_refused_before_anything_runs(host: CpuHost) -> None:
    plan = Plan()
    add(plan, words(0, 8), words(8, 8), 1)
    with pytest.raises(HostError, match="needs 64 bytes in slot 0 but its buffer has 32"):
        host.submit(host.prepare(plan), [host.allocate(32, "data")])


def test_memory_is_counted_and_mappings_are_not_copied() -> None:
    host = CpuHost(threads=1)
    first, second = host.allocate(1000, "a"), host.allocate(500, "b")
    host.release(first)
    assert (host.allocated_bytes, host.peak_bytes) == (500, 1500)
    array = np.arange(64, dtype=np.uint8)
    bound = host.bind(array, "mapping")
    array[3] = 99
    assert host.read(bound, 3, "u1", 1)[0] == 99
    assert host.allocated_bytes == 500
    host.copy(bound, 0, second, 4, 8)
    assert host.read(second, 4, "u1", 8).tolist() == [0, 1, 2, 99, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="leave a buffer of 500 bytes"):
        host.read(second, 499, "u1", 2)


def test_a_view_outlives_the_buffer_object() -> None:
    memory = _cpu.Memory(4096, "short-lived")
    view = memory.view
    view[:] = 7
    del memory
    assert set(view.tolist()) == {7}


def test_the_instruction_set_can_be_chosen_and_a_wrong_one_is_refused() -> None:
    usable = [name for name, supported in _cpu.isa_names() if supported]
    assert choose_isa({}) == usable[0]
    assert choose_isa({"LILY_CPU_ISA": "portable"}) == "portable"
    with pytest.raises(UsageError, match="LILY_CPU_ISA is 'avx3' but there is no such instruction set; use one of"):
        choose_isa({"LILY_CPU_ISA": "avx3"})
    for name, supported in _cpu.isa_names():
        if not supported:
            with pytest.raises(UsageError, match="this processor does not run it"):
                choose_isa({"LILY_CPU_ISA": name})


def test_a_library_without_kernels_is_refused(tmp_path: Path) -> None:
    empty = library('extern "C" int nothing() { return 0; }', tmp_path)
    with pytest.raises(HostError, match="lily_kernels"):
        CpuHost(threads=1, libraries=[empty])


def test_a_library_for_another_interface_is_refused(tmp_path: Path) -> None:
    old = library(SOURCE.replace("kTable{lily::kAbiVersion", "kTable{lily::kAbiVersion + 1"), tmp_path)
    with pytest.raises(HostError, match="were built for interface"):
        CpuHost(threads=1, libraries=[old])


def test_the_meta_host_counts_and_refuses_to_run() -> None:
    host = MetaHost()
    buffer = host.allocate(1 << 40, "a terabyte")
    assert host.peak_bytes == 1 << 40
    host.release(buffer)
    assert host.allocated_bytes == 0
    plan = Plan()
    add(plan, words(0, 8), words(8, 8), 1)
    with pytest.raises(HostError, match="only counts"):
        host.submit(host.prepare(plan), [buffer])
