"""Group commit: one thread writes, and all that waits goes into one transaction.

A job is acknowledged (its ``await`` returns) only after the commit that has it. So whatever the hub
answered is there after a kill at any moment, and a thousand heartbeats a second cost a few dozen
commits.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from linkcpp.hub.heartbeat_rows import HeartbeatRow, write_heartbeats
from linkcpp.hub.problems import HubProblem

_T = TypeVar("_T")
_MOST_WAITING = 50_000


class BatchReport(NamedTuple):
    """One commit: how many writes it had, and how long it took."""

    write_count: int
    seconds: float


class _Job(NamedTuple):
    work: Callable[[Connection], Any]
    done: asyncio.Future[Any]


class Writer:
    """The one writer of a database."""

    def __init__(self, engine: Engine, report: Callable[[BatchReport], None]) -> None:
        self._engine = engine
        self._report = report
        self._jobs: list[_Job] = []
        self._heartbeats: dict[str, HeartbeatRow] = {}
        self._heartbeats_done: asyncio.Future[None] | None = None
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hub-writer")
        self._task = asyncio.create_task(self._run())

    async def write(self, work: Callable[[Connection], _T]) -> _T:
        """Let ``work`` write in the next transaction; return what it returns once committed.

        What it raises undoes its own writes only.

        Raises:
            HubProblem: the database cannot be written to now.
        """
        self._check_room()
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._jobs.append(_Job(work, done))
        self._wake.set()
        return await done

    async def heartbeat(self, row: HeartbeatRow) -> None:
        """Note that a node is alive; returns once it is committed.

        Raises:
            HubProblem: the database cannot be written to now.
        """
        self._check_room()
        earlier = self._heartbeats.get(row.node_id)
        self._heartbeats[row.node_id] = row.after(earlier) if earlier else row
        if self._heartbeats_done is None:
            self._heartbeats_done = asyncio.get_running_loop().create_future()
        self._wake.set()
        # Many wait for one future: the end of one of them must not end it for the others.
        await asyncio.shield(self._heartbeats_done)

    async def aclose(self) -> None:
        """Write what waits, and end."""
        with contextlib.suppress(HubProblem):
            await self.write(lambda _: None)  # done when all that came before it is
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()

    def _check_room(self) -> None:
        if len(self._jobs) + len(self._heartbeats) >= _MOST_WAITING:
            raise HubProblem(503, "busy", "The hub's database does not keep up.")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            jobs, self._jobs = self._jobs, []
            rows, self._heartbeats = list(self._heartbeats.values()), {}
            beaten, self._heartbeats_done = self._heartbeats_done, None
            started = perf_counter()
            try:
                results = await loop.run_in_executor(self._thread, self._commit, jobs, rows)
            except SQLAlchemyError:
                problem = HubProblem(503, "database", "The hub's database does not answer.")
                results = [problem] * len(jobs)
                _finish(beaten, problem)
            except asyncio.CancelledError:
                raise
            else:
                self._report(BatchReport(len(jobs) + len(rows), perf_counter() - started))
                _finish(beaten, None)
            for job, result in zip(jobs, results, strict=True):
                _finish(job.done, result)

    def _commit(self, jobs: Sequence[_Job], rows: Sequence[HeartbeatRow]) -> list[Any]:
        results: list[Any] = []
        with self._engine.begin() as connection:
            for job in jobs:
                try:
                    with connection.begin_nested():
                        results.append(job.work(connection))
                except (DataError, IntegrityError):
                    results.append(HubProblem(409, "conflict", "The database refuses that."))
                except SQLAlchemyError:
                    raise
                except Exception as error:
                    results.append(error)
            if rows:
                write_heartbeats(connection, rows)
        return results


def _finish(done: "asyncio.Future[Any] | None", result: Any) -> None:
    if done is None or done.done():
        return
    if isinstance(result, Exception):
        done.set_exception(result)
        done.exception()  # seen: nobody may be waiting any more
    else:
        done.set_result(result)
