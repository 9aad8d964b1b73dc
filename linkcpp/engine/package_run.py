"""Run pip or uv: progress read off its output, everything in a log file, ended with linkcpp."""

import contextlib
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from linkcpp.common.errors import LinkcppError
from linkcpp.engine.staging import ProgressReport, disk_error

_MAX_LINE_BYTES = 64 * 1024
_END_SECONDS = 5.0
# ninja: "[12/345] Building …"; make: "[ 42%] Building …".
_NINJA = re.compile(r"\[(\d+)/(\d+)\] ")
_MAKE = re.compile(r"\[\s*(\d+)%\] ")
_PIP = re.compile(r"\s*Progress (\d+) of (\d+)")
_STEPS = {
    "Collecting": "resolve",
    "Downloading": "download",
    "Preparing metadata": "prepare",
    "Building wheel": "build",
    "Installing collected": "copy",
}
_REASONS = (
    (
        re.compile(r"No space left on device|Disk quota exceeded"),
        "the disk is full",
        "Free some space (temporary files count too: TMPDIR names another folder).",
    ),
    (
        re.compile(r"No matching distribution found|Could not find a version"),
        "the package index has no such package for this machine",
        "Check the network and the index that pip is set up to use.",
    ),
    (
        re.compile(r"Connection (?:refused|timed out)|Name or service not known|ReadTimeoutError"),
        "the package index cannot be reached",
        "Check the network, then run the same again.",
    ),
    (
        re.compile(r"CMAKE_CXX_COMPILER|CMAKE_C_COMPILER|No CMAKE"),
        "the compiler does not work",
        "Install a C++ compiler, then run the same again.",
    ),
)


def run_installer(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    report: ProgressReport,
    *,
    name: str,
) -> None:
    """Run ``command`` to its end, its output in ``log``.

    Raises:
        LinkcppError: it fails; the reason as far as its output tells it, and the log file.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            returncode, tail = _run(command, environment, file, report)
    except OSError as error:
        raise disk_error(error, log.parent) from error
    if returncode != 0:
        reason, hint = explain_failure(tail)
        raise LinkcppError(f"Installing {name} failed: {reason}.", hint=f"{hint} The log: {log}.")


def explain_failure(output: str) -> tuple[str, str]:
    """Find the reason and the way out in the installer's output."""
    for pattern, reason, hint in _REASONS:
        if pattern.search(output):
            return reason, hint
    errors = [line.strip() for line in output.splitlines() if re.search(r"\berror\b", line, re.I)]
    # The first error line is the cause; what follows it is mostly its echo.
    return (errors[0][:200].rstrip(".") if errors else "no reason was given"), "Look at the log."


def read_progress(line: str) -> tuple[str, int | None, int | None] | None:
    """Read one line of output as (step, done, total); ``None`` where it tells no progress."""
    if match := _NINJA.search(line):
        return "build", int(match[1]), int(match[2])
    if match := _PIP.match(line):
        return "download", int(match[1]), int(match[2])
    if match := _MAKE.search(line):
        return "build", int(match[1]), 100
    for start, step in _STEPS.items():
        if line.lstrip().startswith(start):
            return step, None, None
    return None


def _run(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], report: ProgressReport
) -> tuple[int, str]:
    # A session of its own, so that the compilers below it can be ended together with it.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    tail: deque[str] = deque(maxlen=400)
    try:
        for line in _lines(process.stdout):
            log.write(line)
            text = line.decode(errors="replace")
            tail.append(text)
            if progress := read_progress(text):
                report(*progress)
        return process.wait(), "".join(tail)
    finally:
        _end(process)


def _lines(stream: IO[bytes] | None) -> Iterator[bytes]:
    while stream is not None and (line := stream.readline(_MAX_LINE_BYTES)):
        yield line


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
