"""Group commit: one thread writes, and all that waits goes into one transaction.

A job is acknowledged (its ``await`` returns) only after the commit that has it. So whatever the hub
answered is there after a kill at any moment, and a thousand heartbeats a second cost a few dozen
commits.

What takes rights away does not wait for a database that cannot be written to (``take_away``): it is
owed then, and the first thing in every later transaction until one of them is committed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from linkcpp.hub.database import describe_error, disk_full
from linkcpp.hub.errors import ApiError
from linkcpp.hub.heartbeat_rows import HeartbeatRow, LeaveRow, write_heartbeats

_T = TypeVar("_T")
_MAX_WAITING = 50_000
_GATHER_SECONDS = 0.02
_OWED_PAUSE_SECONDS = 1.0

_log = logging.getLogger(__name__)


class BatchReport(NamedTuple):
    """One commit: how many writes it had, and how long it took."""

    write_count: int
    seconds: float


class _Job(NamedTuple):
    work: Callable[[Connection], Any]
    done: asyncio.Future[Any]


class _Beat(NamedTuple):
    row: HeartbeatRow | LeaveRow
    done: asyncio.Future[None]


class Writer:
    """The one writer of a database."""

    def __init__(self, engine: Engine, report: Callable[[BatchReport], None]) -> None:
        self._engine = engine
        self._report = report
        self._jobs: list[_Job] = []
        self._beats: list[_Beat] = []
        self._owed: list[_Job] = []
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hub-writer")
        self._task = asyncio.create_task(self._run())

    async def write(self, work: Callable[[Connection], _T]) -> _T:
        """Let ``work`` write in the next transaction; return what it returns once committed.

        What it raises undoes its own writes only.

        Raises:
            ApiError: the database cannot be written to now.
        """
        self._check_room()
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._jobs.append(_Job(work, done))
        self._wake.set()
        self._hurry.set()
        return await done

    async def take_away(self, work: Callable[[Connection], None]) -> ApiError | None:
        """Let ``work`` write that somebody may do less, now or as soon as that is possible.

        Returns ``None`` once it is committed, or why it is not yet: it then comes before all that
        is written later, so that nobody uses in between what was taken away.

        Raises:
            ApiError: what ``work`` raises.
        """
        done: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self._owed.append(_Job(work, done))
        self._wake.set()
        self._hurry.set()
        return await done

    async def heartbeat(self, row: HeartbeatRow | LeaveRow) -> None:
        """Note that a node is alive, or that it leaves; returns once it is committed.

        Of one node the later call counts, and is the later one to return.

        Raises:
            ApiError: the database cannot be written to now.
        """
        self._check_room()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._beats.append(_Beat(row, done))
        self._wake.set()
        await done

    async def aclose(self) -> None:
        """Write what waits, and end."""
        with contextlib.suppress(ApiError):
            await self.write(lambda _: None)  # done when all that came before it is
        if self._owed:
            _log.error(
                "%d revocations or ended edges could not be written and are forgotten: revoke "
                "again when the hub runs and its database can be written to",
                len(self._owed),
            )
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()

    def _check_room(self) -> None:
        if len(self._jobs) + len(self._beats) >= _MAX_WAITING:
            raise ApiError(503, "busy", "The hub's database does not keep up.")

    async def _run(self) -> None:
        while True:
            pause_seconds = _OWED_PAUSE_SECONDS if self._owed else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause_seconds)
            # Heartbeats may wait a moment for others: one commit then does for all of them.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), _GATHER_SECONDS)
            self._wake.clear()
            self._hurry.clear()
            jobs, self._jobs = self._jobs, []
            beats, self._beats = self._beats, []
            await self._write_batch(jobs, beats)

    async def _write_batch(self, jobs: Sequence[_Job], beats: Sequence[_Beat]) -> None:
        started = perf_counter()
        rows = [beat.row for beat in beats]
        loop = asyncio.get_running_loop()
        results: list[Any]
        noted: ApiError | None = None
        owed = tuple(self._owed)
        try:
            results = await loop.run_in_executor(self._thread, self._commit, (*owed, *jobs), rows)
        except SQLAlchemyError as error:
            _log.warning("the database cannot be written to: %s", describe_error(error))
            noted = disk_full(error) or ApiError(
                503, "database", "The hub's database does not answer."
            )
            for job in owed:
                if not job.done.done():
                    job.done.set_result(noted)
            results = [noted] * len(jobs)
        else:
            del self._owed[: len(owed)]
            count = len(owed) + len(jobs) + len(rows)
            self._report(BatchReport(count, perf_counter() - started))
            jobs = (*owed, *jobs)
        for job, result in zip(jobs, results, strict=True):
            _finish(job.done, result)
        for beat in beats:
            _finish(beat.done, noted)

    def _commit(self, jobs: Sequence[_Job], rows: Sequence[HeartbeatRow | LeaveRow]) -> list[Any]:
        results: list[Any] = []
        with self._engine.begin() as connection:
            for job in jobs:
                try:
                    with connection.begin_nested():
                        results.append(job.work(connection))
                except (DataError, IntegrityError):
                    results.append(ApiError(409, "conflict", "The database refuses that."))
                except SQLAlchemyError:
                    raise
                except Exception as error:
                    results.append(error)
            if rows:
                write_heartbeats(connection, rows)
        return results


def _finish(done: asyncio.Future[Any], result: Any) -> None:
    if done.done():
        return
    if isinstance(result, Exception):
        done.set_exception(result)
        done.exception()  # seen: nobody may be waiting any more
    else:
        done.set_result(result)
