"""What the machine says of its memory, in every form that systems and containers say it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lily.machine import Memory, parse_vm_stat, read_machine, read_memory

GIB = 1 << 30
linux_only = pytest.mark.skipif(sys.platform == "darwin", reason="reads the files of Linux")

MEMINFO = "MemTotal:       16777216 kB\nMemFree:          100000 kB\nMemAvailable:    8388608 kB\n"
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            400000.
Pages inactive:                          300000.
Pages speculative:                         2000.
Pages wired down:                        200000.
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@linux_only
def test_meminfo(tmp_path: Path) -> None:
    assert read_memory(write(tmp_path, {"proc/meminfo": MEMINFO})) == Memory(16 * GIB, 8 * GIB)


@linux_only
def test_nothing_is_invented_where_the_system_says_nothing(tmp_path: Path) -> None:
    assert read_memory(tmp_path) == Memory(None, None)


@linux_only
def test_a_container_limit_counts_and_cached_files_do_not(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/box/inner\n",
        "sys/fs/cgroup/box/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/box/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {1 * GIB}\n",
        "sys/fs/cgroup/box/inner/memory.max": "max\n",
        "sys/fs/cgroup/box/inner/memory.current": "5\n",
    }
    assert read_memory(write(tmp_path, files)) == Memory(4 * GIB, 2 * GIB, limited=True)


@linux_only
def test_a_container_that_sees_itself_as_the_root(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/../elsewhere\n",
        "sys/fs/cgroup/memory.max": f"{12 * GIB}\n",
        "sys/fs/cgroup/memory.current": "0\n",
    }
    # The limit is the container's, but other programs have taken all but 8 GiB.
    assert read_memory(write(tmp_path, files)) == Memory(12 * GIB, 8 * GIB, limited=True)


@linux_only
def test_first_version_groups(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{3 * GIB}",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
    }
    assert read_memory(write(tmp_path, files)) == Memory(2 * GIB, 0, limited=True)


def test_vm_stat_counts_what_macos_can_hand_out() -> None:
    assert parse_vm_stat(VM_STAT) == 16384 * (10_000 + 300_000 + 2_000)
    assert parse_vm_stat("") is None


def test_this_machine() -> None:
    machine = read_machine()
    assert machine.cores >= 1
    assert all((machine.system, machine.architecture, machine.processor, machine.python))
    memory = machine.memory
    assert memory.total is not None
    assert memory.available is not None
    assert 0 < memory.available <= memory.total
