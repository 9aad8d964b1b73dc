"""What to run and how to keep it running, and the pure decisions about it."""

import re
import signal
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from pydantic import Field

from linkcpp.common.logs import said_in_line
from linkcpp.common.records import Record


class RestartPolicy(Record):
    """How often and how soon a program that ended by itself is started again.

    The delay doubles from ``first_delay_seconds`` up to ``largest_delay_seconds``. A run of
    ``forget_after_seconds`` or longer makes what was before it forgotten. ``limit`` 0: never.
    """

    limit: int = 0
    first_delay_seconds: float = 0.5
    largest_delay_seconds: float = 30.0
    forget_after_seconds: float = 60.0


class ProcessSpec(Record):
    """A program to run.

    It counts as ready once a line of its output matches ``ready_pattern`` (a regular expression)
    and it listens on ``ready_port``, each where given. ``library_folders`` go first on the
    loader's path. The log keeps at most ``log_bytes``, and as much again in its predecessor,
    ``<log_path>.1``.
    """

    name: str
    argv: tuple[str, ...]
    log_path: Path
    environment: dict[str, str] = Field(default_factory=dict)
    library_folders: tuple[Path, ...] = ()
    ready_pattern: str | None = None
    ready_port: int | None = None
    ready_timeout_seconds: float = 60.0
    stop_timeout_seconds: float = 5.0
    restart: RestartPolicy = RestartPolicy()
    log_bytes: int = 16 * 2**20


class ProcessState(StrEnum):
    """The life of a supervised program; the last two are final."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen."""
        return self in (ProcessState.STOPPED, ProcessState.FAILED)


class ProcessStatus(Record):
    """A program at one moment. ``detail`` says why it is not running, ``restart_count`` how often
    it was started again.
    """

    state: ProcessState
    pid: int | None = None
    detail: str | None = None
    restart_count: int = 0


def failures_after_run(policy: RestartPolicy, failures: int, ran_seconds: float) -> int:
    """Count one more run that ended by itself; a long one wipes out those before it."""
    return 1 if ran_seconds >= policy.forget_after_seconds else failures + 1


def restart_delay_seconds(policy: RestartPolicy, failures: int) -> float | None:
    """Return how long to wait after the ``failures``-th failure, ``None`` to give up."""
    if failures > policy.limit:
        return None
    # 2**64 half seconds are past any limit, and larger exponents overflow a float.
    delay = policy.first_delay_seconds * 2.0 ** min(failures - 1, 64)
    return min(delay, policy.largest_delay_seconds)


_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TELLING = re.compile(
    r"error|fail|cannot|can't|couldn't|unable|abort|assert|invalid|unknown|refused|denied|"
    r"not found|no such|out of memory|terminat",
    re.IGNORECASE,
)
# glibc and musl, Android's linker, macOS's dyld.
_MISSING_LIBRARY = re.compile(
    r"error while loading shared libraries: ([^\s:]+): cannot open"
    r"|Error loading shared library ([^\s:]+): No such file"
    r'|CANNOT LINK EXECUTABLE .*library "([^"]+)" not found'
    r"|Library not loaded: (\S+)"
)


def clean_line(line: str) -> str:
    """Strip colours and control characters of a line of output."""
    return _ESCAPES.sub("", line).rstrip()


def missing_library(lines: Iterable[str]) -> str | None:
    """Return the shared library that the loader did not find, if the output says so."""
    for line in lines:
        if match := _MISSING_LIBRARY.search(line):
            return next(name for name in match.groups() if name)
    return None


def telling_line(lines: Iterable[str]) -> str | None:
    """Return the last line that sounds like a reason, or else the last that says anything."""
    said = (said_in_line(line.strip()) for line in lines)
    spoken = [line for line in said if any(sign.isalnum() for sign in line)]
    for line in reversed(spoken):
        if _TELLING.search(line):
            return line
    return spoken[-1] if spoken else None


def signal_name(number: int) -> str:
    """Return ``SIGILL`` for 4."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(code: int, lines: Iterable[str]) -> str:
    """Say how a program ended, from its exit code (negative: a signal) and its last output."""
    lines = list(lines)
    if library := missing_library(lines):
        return f"misses the shared library {library}"
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), which often means that memory ran out"
    how = f"died of {signal_name(-code)}" if code < 0 else f"exited with {code}"
    reason = telling_line(lines)
    return f"{how}: {reason}" if reason else how
