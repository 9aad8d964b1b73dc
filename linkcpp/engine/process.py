"""Supervision of engine programs: started through a keeper, watched, restarted, stopped.

The program's parent is its keeper (``keeper.py``), whose parent is this process. Whatever way this
process ends, the keeper's life line breaks and the program is stopped.
"""

import asyncio
import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.engine.process_run import KeptRun, listens_on, wait_until_hung
from linkcpp.engine.process_spec import (
    ProcessSpec,
    ProcessState,
    ProcessStatus,
    clean_line,
    describe_exit,
    failures_after_run,
    missing_library,
    restart_delay_seconds,
)

_REMEMBERED_LINES = 200
_POLL_SECONDS = 0.02
# Where the system does not tell who listens: what a program needs from its words to its socket.
_SETTLE_SECONDS = 1.0
_LOOK_SECONDS = 2.0
_KEEPER_MARGIN_SECONDS = 10.0


class _Ending(NamedTuple):
    """How one run of the program ended; ``may_retry`` is false where another try is useless."""

    reason: str
    may_retry: bool
    ran_seconds: float


class SupervisedProcess:
    """A program that is kept running until ``stop``.

    ``on_change`` is called with every new status and ``on_line`` with every line of output, from
    the event loop; they must not block.

    A program that hangs is ended, as if it had ended by itself (``engine/liveness.py``). ``probe``
    is as in ``wait_until_hung``: never one that connects to an rpc-server.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        on_change: Callable[[ProcessStatus], None] | None = None,
        on_line: Callable[[str], None] | None = None,
        probe: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self.spec = spec
        self._probe = probe
        self.complaint: str | None = None
        self._on_change = on_change
        self._on_line = on_line
        self._status = ProcessStatus(state=ProcessState.STARTING)
        self._task: asyncio.Task[None] | None = None
        self._stop_wanted = asyncio.Event()
        self._settled = asyncio.Event()
        self._matched = asyncio.Event()
        self._pattern = re.compile(spec.ready_pattern) if spec.ready_pattern else None
        self._recent: deque[str] = deque(maxlen=_REMEMBERED_LINES)

    @property
    def status(self) -> ProcessStatus:
        """The program now."""
        return self._status

    @property
    def pid(self) -> int | None:
        """The process id of the program (not of its keeper) while it runs."""
        return self._status.pid

    @property
    def recent_lines(self) -> tuple[str, ...]:
        """The last lines of output of the last run."""
        return tuple(self._recent)

    def start(self) -> None:
        """Begin to supervise; needs a running event loop.

        Raises:
            RuntimeError: it was started or stopped before.
        """
        if self._task is not None or self._status.state.is_final:
            raise RuntimeError(f"{self.spec.name} was started or stopped before")
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.spec.name}")

    async def wait_ready(self) -> None:
        """Wait until the program is ready, over restarts.

        Raises:
            LinkcppError: it failed for good, or was stopped meanwhile.
        """
        if self._task is None and not self._status.state.is_final:
            raise RuntimeError(f"{self.spec.name} was not started")
        await self._settled.wait()
        if self._status.state is ProcessState.FAILED:
            raise LinkcppError(
                f"{self.spec.name} {self._status.detail}.", hint=f"Its log: {self.spec.log_path}"
            )
        if self._status.state is ProcessState.STOPPED:
            raise LinkcppError(f"{self.spec.name} was stopped before it was ready.")

    async def start_and_wait(self) -> None:
        """Start, and wait until the program is ready; end it where it does not become that.

        Raises:
            LinkcppError: as ``wait_ready``.
        """
        self.start()
        try:
            await self.wait_ready()
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> ProcessStatus:
        """Wait for the end of supervision and return the final status."""
        if self._task is not None:
            await asyncio.shield(self._task)
        return self._status

    async def stop(self) -> None:
        """End the program and everything it started; return when nothing of it is left."""
        self._stop_wanted.set()
        if self._task is None:
            if not self._status.state.is_final:
                self._change(ProcessState.STOPPED)
            return
        await asyncio.shield(self._task)

    def _change(
        self,
        state: ProcessState,
        *,
        pid: int | None = None,
        detail: str | None = None,
        restart_count: int | None = None,
    ) -> None:
        count = self._status.restart_count if restart_count is None else restart_count
        self._status = ProcessStatus(state=state, pid=pid, detail=detail, restart_count=count)
        if state is ProcessState.READY or state.is_final:
            self._settled.set()
        else:
            self._settled.clear()
        if self._on_change is not None:
            self._on_change(self._status)

    def _take_line(self, line: str) -> None:
        self._recent.append(line)
        if self._pattern is not None and self._pattern.search(line):
            self._matched.set()
        if self._on_line is not None:
            self._on_line(line)

    async def _supervise(self) -> None:
        try:
            await self._keep_running()
        finally:
            # Cancelled, or a callback raised: whoever waits must not wait for ever.
            if not self._status.state.is_final:
                self._change(ProcessState.FAILED, detail="is no longer supervised")

    async def _keep_running(self) -> None:
        failures = 0
        policy = self.spec.restart
        while True:
            ending = await self._run_once()
            if self._stop_wanted.is_set():
                self._change(ProcessState.STOPPED)
                return
            failures = failures_after_run(policy, failures, ending.ran_seconds)
            delay = restart_delay_seconds(policy, failures) if ending.may_retry else None
            if delay is None:
                self._change(ProcessState.FAILED, detail=ending.reason)
                return
            self._change(ProcessState.BACKING_OFF, detail=ending.reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_wanted.wait(), delay)
            if self._stop_wanted.is_set():
                self._change(ProcessState.STOPPED)
                return
            self._change(ProcessState.STARTING, restart_count=self._status.restart_count + 1)

    async def _run_once(self) -> _Ending:
        """Run the program until it ends by itself, is late, or is to stop."""
        began = time.monotonic()
        self._recent.clear()
        self._matched.clear()
        try:
            run = await KeptRun.start(self.spec, self._take_line)
        except OSError as error:
            return _Ending(f"cannot be started: {error.strerror or error}", False, 0.0)
        following = asyncio.create_task(run.follow())
        try:
            self.complaint = await self._watch(run, following)
        finally:
            run.end()
            await self._outlast(run, following)
        reason, may_retry = (self.complaint, True) if self.complaint else self._explain(run)
        return _Ending(reason, may_retry, time.monotonic() - began)

    async def _watch(self, run: KeptRun, following: "asyncio.Task[None]") -> str | None:
        """Return at the program's end or when it is to stop; a complaint if that is the reason."""
        stopping = asyncio.create_task(self._stop_wanted.wait())
        becoming_ready = asyncio.create_task(self._become_ready(run))
        hanging = asyncio.create_task(self._hang(run))
        ends: set[asyncio.Future[Any]] = {following, stopping, hanging}
        try:
            done, _ = await asyncio.wait(
                {*ends, becoming_ready},
                timeout=self.spec.ready_timeout_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                last = f" (its last line: {self._recent[-1]})" if self._recent else ""
                return f"was not ready within {self.spec.ready_timeout_seconds:g} s{last}"
            if becoming_ready in done and not ends & done:
                self._change(ProcessState.READY, pid=run.pid)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if hanging.done() and not (following.done() or stopping.done()):
                return f"hung: {hanging.result()}"
            return None
        finally:
            for task in (stopping, becoming_ready, hanging):
                task.cancel()

    async def _hang(self, run: KeptRun) -> str:
        await run.started.wait()
        if run.pid is None:
            await asyncio.Event().wait()
            raise AssertionError
        return await wait_until_hung(run.pid, look_seconds=_LOOK_SECONDS, probe=self._probe)

    async def _become_ready(self, run: KeptRun) -> None:
        await run.started.wait()
        if run.pid is None:
            await asyncio.Event().wait()
        self._change(ProcessState.STARTING, pid=run.pid)
        if self._pattern is not None:
            await self._matched.wait()
        if self.spec.ready_port is not None and run.pid is not None:
            while not (listening := listens_on(run.pid, self.spec.ready_port)):
                if listening is None:
                    await asyncio.sleep(_SETTLE_SECONDS)
                    return
                await asyncio.sleep(_POLL_SECONDS)

    async def _outlast(self, run: KeptRun, following: "asyncio.Task[None]") -> None:
        """Wait until keeper and program are gone; the keeper has its own time limit for that."""
        limit = self.spec.stop_timeout_seconds + _KEEPER_MARGIN_SECONDS
        try:
            # Not only ``following``: a loop that is shut down has cancelled that too.
            await asyncio.wait_for(run.keeper.wait(), limit)
        except TimeoutError:
            run.keeper.kill()
            await run.keeper.wait()
        await asyncio.wait({following})
        if not following.cancelled():
            following.result()

    def _explain(self, run: KeptRun) -> tuple[str, bool]:
        if run.start_error is not None:
            return f"cannot be started: {self.spec.argv[0]}: {os.strerror(run.start_error)}", False
        if run.exit_code is not None:
            missing = missing_library(self._recent)
            return describe_exit(run.exit_code, self._recent), missing is None
        if run.pid is None:
            return f"cannot be started: {run.complaint or 'its keeper ended at once'}", False
        return "lost its keeper and was ended with it", True


def tail_log(path: Path, line_count: int) -> list[str]:
    """Return the last lines of a program's log, going back into its predecessor if need be."""
    lines: list[str] = []
    for part in (path, path.with_name(f"{path.name}.1")):
        with contextlib.suppress(FileNotFoundError):
            text = part.read_text(encoding="utf-8", errors="replace")
            lines = [clean_line(line) for line in text.splitlines()] + lines
        if len(lines) >= line_count:
            break
    return lines[max(0, len(lines) - line_count) :]
