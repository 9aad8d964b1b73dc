"""A hub as a whole: its parts, from the first to the last moment."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Engine

from linkcpp.common.closing import AsyncClosing
from linkcpp.common.files import write_atomically
from linkcpp.hub.clock_steps import ClockSteps
from linkcpp.hub.database import open_database
from linkcpp.hub.directory import load_directory
from linkcpp.hub.edges import Edges
from linkcpp.hub.errors import ApiError
from linkcpp.hub.events import EventSockets
from linkcpp.hub.identity import load_hub_identity
from linkcpp.hub.join_tokens import create_join_token, revoke_join_token
from linkcpp.hub.metrics import HubMetrics
from linkcpp.hub.presence_probe import PresenceProbe
from linkcpp.hub.registrar import Registrar
from linkcpp.hub.weights.catalogue import Catalogue, models_folder
from linkcpp.hub.weights.library import Library
from linkcpp.hub.weights.streaming import Downloads
from linkcpp.hub.writer import Writer
from linkcpp.registry.records import JoinTokenRequest, Role
from linkcpp.registry.secret_file import SECRET_MODE

_T = TypeVar("_T")
_TICK_SECONDS = 1.0
_READERS = 2
FIRST_TOKEN_SECONDS = 7 * 86400.0

_log = logging.getLogger(__name__)


class Hub(AsyncClosing):
    """One hub, for use as an asynchronous context manager.

    ``engine`` is an open database (``linkcpp.hub.database``), which the hub closes at its end.
    """

    def __init__(
        self,
        data: Path,
        engine: Engine,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.data = data
        self.clock = clock
        self.unwritten_token_ids: set[str] = set()
        self._steps = ClockSteps(clock, steady)
        self.identity = load_hub_identity(data, create=True)
        self.metrics = HubMetrics()
        self.events = EventSockets()
        self.library = Library(Catalogue(models_folder(data)))
        self.downloads = Downloads()
        self._engine = engine
        self.directory = load_directory(engine, clock())
        self.writer = Writer(engine, self.metrics.observe_commit)
        self.presence_probe = PresenceProbe(self.events)
        self.edges = Edges(
            self.identity,
            self.directory,
            self.writer,
            self.events,
            presence_probe=self.presence_probe,
            clock=clock,
        )
        self.registrar = Registrar(
            self.identity,
            self.directory,
            self.writer,
            self.events,
            self.edges,
            presence_probe=self.presence_probe,
            clock=clock,
        )
        self._watch()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="hub-reader")
        self._ticking = asyncio.create_task(self._tick())

    async def aclose(self) -> None:
        """Give back what it holds; may be called twice."""
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)
        await self.writer.aclose()
        self.downloads.close()
        self._readers.shutdown()
        self._engine.dispose()

    async def read(self, work: Callable[[Engine], _T]) -> _T:
        """Let ``work`` read from the database in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, self._engine)

    def render_metrics(self) -> bytes:
        """Write the metrics in Prometheus' text format."""
        return self.metrics.render(self.directory, self.clock())

    async def revoke(self, node_id: str) -> ApiError | None:
        """Cut a machine off at once: its tokens, events, edges and downloads.

        Returns why that could not be written yet, if so.

        Raises:
            ApiError: there is no such machine.
        """
        self.downloads.end_all_of(node_id)
        unwritten = await self.registrar.revoke(node_id)
        self.downloads.end_all_of(node_id)
        return unwritten

    async def revoke_join_token(self, token_id: str) -> ApiError | None:
        """Make a join token useless; returns why that could not be written yet, if so.

        Nobody joins without a write, and this one comes before it.

        Raises:
            ApiError: there is none with this id.
        """
        now = self.clock()
        unwritten = await self.writer.take_away(
            lambda connection: revoke_join_token(connection, token_id, now)
        )
        if unwritten is not None:
            self.unwritten_token_ids.add(token_id)
        return unwritten

    async def make_first_token(self) -> Path | None:
        """Make a join token for the first admin where nobody joined yet; return its file.

        Only the file has it: it is neither printed nor logged.
        """
        path = self.data / "admin-join-token"
        if self.directory.machines or path.exists():
            return None
        request = JoinTokenRequest(
            role=Role.ADMIN, lifetime_seconds=FIRST_TOKEN_SECONDS, label="first admin"
        )
        now = self.clock()
        made = await self.writer.write(
            lambda connection: create_join_token(connection, request, now)
        )
        write_atomically(path, made.token + "\n", mode=SECRET_MODE)
        return path

    def _watch(self) -> None:
        watch = self.metrics.watch
        watch("edges", "Open edges.", lambda: len(self.directory.edges))
        watch("event_listeners", "Machines that listen to events.", lambda: self.events.count)
        watch(
            "gateways_online",
            "Gateways that may be given edges.",
            lambda: len(self.directory.online(self.clock())),
        )
        watch("downloads", "Downloads of weights.", lambda: self.downloads.running_count)
        watch("weights_sent_bytes", "Weights that were sent.", lambda: self.downloads.sent_bytes)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            if step := self._steps.take():
                _log.warning(
                    "the hub's clock was set %s by %.0f s: machines go on, tokens last %s",
                    *(("forward", step, "shorter") if step > 0 else ("back", -step, "longer")),
                )
                self.directory.follow_clock(step, self.clock())
            try:
                await self.edges.close_unseen()
                await self.edges.move_lost()
            except ApiError as error:
                _log.warning("edges are not looked after: %s", error)


async def open_hub(
    data: Path,
    database_url: str | None = None,
    *,
    clock: Callable[[], float] = time.time,
    steady: Callable[[], float] = time.monotonic,
) -> Hub:
    """Open the hub of a data folder.

    Raises:
        LinkcppError: its database or its secrets cannot be used.
    """
    engine = await asyncio.to_thread(open_database, database_url, data)
    return Hub(data, engine, clock=clock, steady=steady)
