"""Memory and cores that this process may really use: the machine's, within cgroup limits.

In a container psutil tells the host's numbers, while the kernel ends a process that goes beyond
its control group. Files: the kernel's ``admin-guide/cgroup-v2.rst`` and ``cgroup-v1/memory.rst``.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


class Memory(NamedTuple):
    """System memory in bytes; ``available_bytes`` can be taken without swapping."""

    total_bytes: int
    available_bytes: int


def system_memory() -> Memory:
    """Return the memory of the machine or, where that is less, of its control groups."""
    machine = psutil.virtual_memory()
    return memory_within(Memory(machine.total, machine.available), _CGROUP_ROOT, _read(_MEMBERSHIP))


def usable_cores() -> int:
    """Count the cores that this process may run on, within affinity and CPU quota."""
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return cores_within(affinity, _CGROUP_ROOT, _read(_MEMBERSHIP))


def memory_within(machine: Memory, root: Path, membership: str) -> Memory:
    """Narrow ``machine`` to the limits of every control group that ``membership`` names.

    ``root`` is where cgroups are mounted, ``membership`` the text of ``/proc/self/cgroup``. File
    cache that the kernel would drop counts as available, as it does in psutil's number.
    """
    total, available = machine
    for folder in _groups(root, membership, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= machine.total_bytes:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        statistics = _table(folder / "memory.stat")
        droppable = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
        total = min(total, limit)
        available = min(available, max(0, limit - max(0, used - droppable)))
    return Memory(total, available)


def cores_within(cores: int, root: Path, membership: str) -> int:
    """Narrow a number of cores to the CPU quotas of the control groups, rounded up."""
    for folder in _groups(root, membership, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not period:
            quota = _read(folder / "cpu.cfs_quota_us")
            period = _read(folder / "cpu.cfs_period_us")
        # "max" (version 2) and -1 (version 1) mean no quota.
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = max(1, min(cores, math.ceil(int(quota) / int(period))))
    return cores


def _groups(root: Path, membership: str, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's groups for a controller, innermost first.

    In a container the path that the host sees may not exist below the mount; its existing parents
    are then those of the container.
    """
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / controllers if controllers else root
        if controllers and not mount.is_dir():
            mount = root / controller
        inner = mount / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_dir():
                yield folder
            if folder == mount:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdecimal() else None


def _table(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
