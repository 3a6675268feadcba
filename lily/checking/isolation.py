"""Checks in a process of their own: a kernel that aborts or crashes is a finding, not the end of the check.

The CPU host stops the process when a kernel asks for more bytes than its variant bound, before memory is touched; and
a plugin's native code may crash in any way. Device hosts can't be carried into another process, and need not be: a
device's fault comes back as an error.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

from lily.checking.check import CaseResult, Harness, failed, never_applicable
from lily.hosts.base import Host
from lily.hosts.cpu import CpuHost
from lily.registry import KernelVariant

__all__ = ["can_isolate", "isolated_results"]

MOST_CRASHES = 3
STDERR = 2


def can_isolate(host: Host) -> bool:
    """Whether variants on this host can be checked in a process of their own."""
    # On macOS the linear algebra library behind numpy does not survive a fork.
    return isinstance(host, CpuHost) and sys.platform.startswith("linux")


def isolated_results(harness: Harness, variant: KernelVariant) -> Iterator[CaseResult]:
    """As :meth:`Harness.results`, but a process that ends early only fails the case it was in.

    The cases after it go on in a new process. After three such ends the rest of the variant's cases are left out, and
    one more failed result says so.
    """
    trials = harness.trials(variant)
    done = crashes = applicable = 0
    while done < len(trials):
        results, reason, after = _run_child(harness, variant, done)
        applicable += len(results)
        yield from results
        if reason is None:
            break
        case, options = trials[after]
        applicable += 1
        crashes += 1
        done = after + 1
        yield failed(case.name, options, reason)
        if crashes == MOST_CRASHES:
            left = f"{len(trials) - done} of {len(trials)}"
            yield failed("the rest", {}, f"left out after {MOST_CRASHES} crashes: {left}")
            break
    if not applicable:
        yield never_applicable(variant)


def _run_child(harness: Harness, variant: KernelVariant, first: int) -> tuple[list[CaseResult], str | None, int]:
    """Trials from ``first`` on: what came back; if the process ended early, how, and in which trial."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    results: list[CaseResult] = []
    current = first
    with tempfile.TemporaryFile() as errors, receiver:
        process = context.Process(target=_child, args=(sender, errors.fileno(), harness, variant, first))
        with warnings.catch_warnings():
            # Python warns of forking where threads run. The child uses none of them: it opens a host of its own.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        sender.close()
        finished = False
        while True:
            try:
                current, result = receiver.recv()
            except EOFError:
                break
            if current < 0:
                finished = True
            elif result is not None:
                results.append(result)
        process.join()
        if finished:
            return results, None, current
        errors.seek(0)
        return results, _describe_end(process.exitcode, errors.read()), current


def _child(sender: Connection, errors: int, parent: Harness, variant: KernelVariant, first: int) -> None:
    # A fork has none of its parent's threads: the parent's hosts can neither run here, nor be closed by the collector.
    gc.freeze()
    os.dup2(errors, STDERR)
    faulthandler.disable()  # its dump would come after what the kernel said
    assert isinstance(parent.host, CpuHost)
    host = CpuHost(threads=parent.host.threads, libraries=parent.registry.kernel_libraries("cpu"))
    harness = Harness(host, parent.registry, parent.policies)
    for index, (case, options) in list(enumerate(parent.trials(variant)))[first:]:
        sender.send((index, None))
        sender.send((index, harness.check(variant, case, options)))
    sender.send((-1, None))
    sender.close()


def _describe_end(exit_code: int | None, errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    said = f": {lines[-1]}" if lines else ""
    if exit_code is not None and exit_code < 0:
        return f"the process was ended by {signal.Signals(-exit_code).name}{said}"
    return f"the process ended with exit code {exit_code}{said}"
