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
from collections.abc import Generator, Iterator
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
    first = crashes = applicable = 0
    while first < len(trials):
        child = _Child(harness, variant, first)
        for result in child.results():
            applicable += 1
            yield result
        if child.end is None:
            break
        case, options = trials[child.current]
        first = child.current + 1
        applicable += 1
        crashes += 1
        yield failed(case.name, options, child.end)
        if crashes == MOST_CRASHES:
            left = f"{len(trials) - first} of {len(trials)}"
            yield failed("the rest", {}, f"left out after {MOST_CRASHES} crashes: {left}")
            break
    if not applicable:
        yield never_applicable(variant)


class _Child:
    """A process that goes through a variant's trials, from number ``first`` on.

    Attributes:
        current: the trial it is in.
        end: how it ended, if early.
    """

    def __init__(self, harness: Harness, variant: KernelVariant, first: int) -> None:
        self._harness = harness
        self._variant = variant
        self._first = self.current = first
        self.end: str | None = None

    def results(self) -> Iterator[CaseResult]:
        """Results as they come in; once there are no more, :attr:`end` is known."""
        context = get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        with tempfile.TemporaryFile() as errors, receiver:
            work = (sender, errors.fileno(), self._harness, self._variant, self._first)
            process = context.Process(target=_work, args=work)
            with warnings.catch_warnings():
                # Python warns of forking where threads run. The child uses none of them: it opens a host of its own.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sender.close()
            try:
                finished = yield from self._received(receiver)
            finally:  # also where nobody wants the rest of the results
                process.terminate()
                process.join()
            if not finished:
                errors.seek(0)
                self.end = _describe_end(process.exitcode, errors.read())

    def _received(self, receiver: Connection) -> Generator[CaseResult, None, bool]:
        """Whether the process came to the end of its trials."""
        while True:
            try:
                message = receiver.recv()
            except EOFError:
                return False
            if message is None:
                return True
            self.current, result = message
            if result is not None:
                yield result


def _work(sender: Connection, errors: int, parent: Harness, variant: KernelVariant, first: int) -> None:
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
    sender.send(None)
    sender.close()


def _describe_end(exit_code: int | None, errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    said = f": {lines[-1]}" if lines else ""
    if exit_code is not None and exit_code < 0:
        return f"the process was ended by {signal.Signals(-exit_code).name}{said}"
    return f"the process ended with exit code {exit_code}{said}"
