"""Which process is which, by what no step of a clock moves; and the processes below one."""

import contextlib
import functools
import subprocess
import sys
from pathlib import Path

import psutil

from linkcpp.common.records import Record

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
# Of ``/proc/PID/stat``, counted behind the name in brackets.
_STATE_FIELD, _START_FIELD = 0, 19
_ENDED_STATES = ("Z", "X")


class ProcessIdentity(Record):
    """A process that cannot be mistaken for a later one with the same number.

    ``start`` is in clock ticks since the boot on Linux, in seconds since 1970 elsewhere, ``None``
    where the system hides it; ``boot_id`` names the boot, ``None`` where nothing does.
    """

    pid: int
    start: float | None
    boot_id: str | None = None

    @property
    def is_of_earlier_boot(self) -> bool:
        """Whether the machine was certainly restarted since this process was seen."""
        now = boot_id()
        return now is not None and self.boot_id is not None and now != self.boot_id


def identity_of(pid: int) -> ProcessIdentity | None:
    """Return the identity of a living process, ``None`` where there is none of that number.

    One that the system does not let us look at is not gone: its ``start`` is ``None``.
    """
    try:
        start = _ticks_of(pid) if (_PROC / "self/stat").exists() else _seconds_of(pid)
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return None
    except (OSError, psutil.AccessDenied):
        start = None
    return ProcessIdentity(pid=pid, start=start, boot_id=boot_id())


def is_alive(identity: ProcessIdentity | None) -> bool:
    """Whether this very process still runs, and not a later one that got its number."""
    if identity is None or identity.is_of_earlier_boot:
        return False
    now = identity_of(identity.pid)
    if now is None:
        return False
    return now.start is None or identity.start is None or now.start == identity.start


@functools.lru_cache(maxsize=1)
def boot_id() -> str | None:
    """Return the system's name for the time since its last start."""
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            told = subprocess.run(
                ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"],
                capture_output=True,
                text=True,
                check=False,
            )
            return told.stdout.strip() or None
        return _BOOT_ID.read_text().strip() or None
    return None


def descendants_of(pid: int) -> tuple[psutil.Process, ...]:
    """Return the processes that a process started, and those that these started, at this moment.

    psutil's own ``children`` compares times of day, which it cannot tell on Android.
    """
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    found = list(children.get(pid, ()))
    for process in found:
        found += children.get(process.pid, ())
    return tuple(found)


def _ticks_of(pid: int) -> int:
    text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    fields = text.rpartition(")")[2].split()
    if fields[_STATE_FIELD] in _ENDED_STATES:
        raise ProcessLookupError(pid)
    return int(fields[_START_FIELD])


def _seconds_of(pid: int) -> float:
    process = psutil.Process(pid)
    if process.status() == psutil.STATUS_ZOMBIE:
        raise ProcessLookupError(pid)
    return process.create_time()
