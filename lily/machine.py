"""This machine: system, processor, cores, and how much memory there is for a model."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine", "Memory", "available_cores", "read_machine", "read_memory"]

KIB = 1024


@dataclass(frozen=True)
class Memory:
    """Main memory in bytes; None where the system does not say.

    Attributes:
        total: of the machine, or what a container may use of it.
        available: what programs can get without pushing others out; cached files count as available.
        limited: a container's limit, not the machine, sets these figures.
    """

    total: int | None
    available: int | None
    limited: bool = False


@dataclass(frozen=True)
class Machine:
    """What ``lily doctor`` says first.

    Attributes:
        system: ``Linux 6.1.0``, ``macOS 15.1``.
        architecture: ``x86_64``, ``arm64``.
        cores: that this process may run on.
    """

    system: str
    architecture: str
    processor: str
    python: str
    cores: int
    memory: Memory


def read_machine() -> Machine:
    """This machine, now."""
    # Not lily.hosts.cpu's own count: this has to work where the compiled part does not load.
    cores = available_cores()
    mac = platform.mac_ver()[0]
    return Machine(
        system=f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        processor=_processor(),
        python=platform.python_version(),
        cores=cores,
        memory=read_memory(),
    )


def read_memory(root: Path = Path("/")) -> Memory:
    """Memory of this machine or container.

    Args:
        root: where ``proc`` and ``sys`` are, on Linux.
    """
    if sys.platform == "darwin":
        total = _output("sysctl", "-n", "hw.memsize")
        return Memory(int(total) if total else None, parse_vm_stat(_output("vm_stat")))
    memory = _meminfo(root)
    for limit, used in _cgroup_limits(root):
        if memory.total is None or limit < memory.total:
            left = max(limit - used, 0)
            available = left if memory.available is None else min(left, memory.available)
            memory = Memory(limit, available, limited=True)
    return memory


def parse_vm_stat(text: str) -> int | None:
    """Bytes that macOS can hand out, from what ``vm_stat`` prints: free, speculative and inactive pages."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = [re.search(rf"Pages {kind}:\s+(\d+)", text) for kind in ("free", "speculative", "inactive")]
    if size is None or None in pages:
        return None
    return int(size[1]) * sum(int(found[1]) for found in pages if found is not None)


def _meminfo(root: Path) -> Memory:
    text = _read(root / "proc/meminfo")
    total, available = (re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE) for key in ("MemTotal", "MemAvailable"))
    return Memory(
        None if total is None else int(total[1]) * KIB, None if available is None else int(available[1]) * KIB
    )


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every group of processes that this one is in; cached files that can be dropped are not used."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = mount / path.lstrip("/")
        for group in [inner, *inner.parents]:
            limit, used = _read(group / names[0]).strip(), _read(group / names[1]).strip()
            if limit.isdecimal() and used.isdecimal():
                cached = re.search(rf"^{names[2]} (\d+)", _read(group / "memory.stat"), re.MULTILINE)
                yield int(limit), int(used) - (int(cached[1]) if cached else 0)
            if group == mount:
                break


def _processor() -> str:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    found = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""  # this system doesn't have the file: what it would say is unknown


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""  # likewise


def available_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
