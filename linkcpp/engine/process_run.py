"""One run of a program under its keeper, as the supervisor sees it."""

import asyncio
import codecs
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

import psutil

from linkcpp.engine.liveness import Liveness, LivenessSample, judge
from linkcpp.engine.process_spec import ProcessSpec, clean_line

_KEEPER = Path(__file__).with_name("keeper.py")
_READ_BYTES = 1 << 16
_MAX_LINE_CHARACTERS = 1 << 14
# More than the longest time that it takes to call a program hung.
_MAX_SAMPLES = 256
# The program sees a terminal, but its output goes to a file; and an abort of ggml would start a
# debugger, whose words bury the reason.
_QUIET = {"TERM": "dumb", "NO_COLOR": "1", "GGML_NO_BACKTRACE": "1"}


class KeptRun:
    """One keeper with its program, and what it has told."""

    def __init__(
        self, keeper: asyncio.subprocess.Process, take_line: Callable[[str], None]
    ) -> None:
        self.keeper = keeper
        self.pid: int | None = None
        self.start_error: int | None = None
        self.exit_code: int | None = None
        self.complaint = ""
        self.started = asyncio.Event()
        self._take_line = take_line

    @classmethod
    async def start(cls, spec: ProcessSpec, take_line: Callable[[str], None]) -> Self:
        """Start a keeper that starts the program; ``take_line`` gets every line of output.

        Raises:
            OSError: not even the keeper can be started, or the log's folder not be made.
        """
        await asyncio.to_thread(spec.log_path.parent.mkdir, parents=True, exist_ok=True)
        keeper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_KEEPER)),
            *(str(spec.log_path), str(spec.log_bytes), str(spec.stop_timeout_seconds)),
            os.pathsep.join(str(folder) for folder in spec.library_folders),
            *spec.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **_QUIET, **spec.environment},
        )
        return cls(keeper, take_line)

    async def follow(self) -> None:
        """Read all that the keeper tells until it is gone."""
        await asyncio.gather(self._read_output(), self._read_reports())
        await self.keeper.wait()
        self.started.set()

    async def _read_output(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        partial = ""
        stdout = self.keeper.stdout
        assert stdout is not None  # noqa: S101 - made with a pipe
        while data := await stdout.read(_READ_BYTES):
            *lines, partial = (partial + decoder.decode(data)).split("\n")
            for line in lines:
                self._take_line(clean_line(line))
            if len(partial) > _MAX_LINE_CHARACTERS:
                self._take_line(clean_line(partial))
                partial = ""
        if partial:
            self._take_line(clean_line(partial))

    async def _read_reports(self) -> None:
        stderr = self.keeper.stderr
        assert stderr is not None  # noqa: S101 - made with a pipe
        while line := (await stderr.readline()).decode(errors="replace").strip():
            match line.split():
                case ["started", number] if number.isdigit():
                    self.pid = int(number)
                    self.started.set()
                case ["failed", number] if number.isdigit():
                    self.start_error = int(number)
                case ["exited", number] if number.isdigit():
                    self.exit_code = int(number)
                case ["killed", number] if number.isdigit():
                    self.exit_code = -int(number)
                case _:
                    self.complaint = line

    def end(self) -> None:
        """Cut the keeper's life line, so that it stops the program."""
        if self.keeper.stdin is not None:
            self.keeper.stdin.close()
        # A keeper that is stopped hears nothing until it goes on.
        with contextlib.suppress(ProcessLookupError):
            self.keeper.send_signal(signal.SIGCONT)


async def wait_until_hung(
    pid: int, *, look_seconds: float, probe: Callable[[], Awaitable[bool]] | None
) -> str:
    """Look at a process again and again; return in a clause why it hangs, once it does.

    ``probe`` asks the program something that it answers at once, whatever else it does, and tells
    whether it did; without one only the system is asked.
    """
    samples: deque[LivenessSample] = deque(maxlen=_MAX_SAMPLES)
    while True:
        is_silent = probe is not None and not await probe()
        if (sample := _sample_of(pid, is_silent=is_silent)) is not None:
            samples.append(sample)
            verdict = judge(tuple(samples))
            if verdict.liveness is Liveness.HUNG:
                return verdict.reason
        await asyncio.sleep(look_seconds)


def _sample_of(pid: int, *, is_silent: bool) -> LivenessSample | None:
    """Return what the system tells of a process; ``None`` where it is gone, or hidden."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            is_stopped = process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return None
    used = times.user + times.system
    return LivenessSample(time.monotonic(), used, is_stopped=is_stopped, is_silent=is_silent)


def listens_on(pid: int, port: int) -> bool | None:
    """Tell whether the process listens on a TCP port; ``None`` where the system hides that.

    Android hides sockets from programs.
    """
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        return False
    except (psutil.AccessDenied, OSError):
        return None
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in connections
    )
