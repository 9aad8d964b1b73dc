"""The coordinator's end of an edge: a loopback port that stands for a node's agent."""

import asyncio
import contextlib
import logging
import random
from typing import Self

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from linkcpp.common.closing import AsyncClosing
from linkcpp.common.errors import LinkcppError
from linkcpp.link.local import reset
from linkcpp.link.offers import EdgeEndedError, OfferSource
from linkcpp.link.paths import PathKeeper
from linkcpp.link.records import CHUNK_BYTES, EdgeLimits, EdgeTimes
from linkcpp.link.status import EdgeState, EdgeStatus
from linkcpp.link.supply import OfferSupply, Pin
from linkcpp.link.transport import TransportLostError
from linkcpp.registry.credentials import pin_peer

HOST = "127.0.0.1"

_GOODBYE_SECONDS = 5.0

_log = logging.getLogger(__name__)


class EdgeEndpoint(AsyncClosing):
    """Carries connections to ``url`` to the agent of a node, over whatever path works.

    Clients show ``token`` to the agent; the node is who it should be, because nobody else can
    derive what the edge is encrypted with. A lost path is replaced as long as it takes. Only when
    the edge is not wanted any more does ``wait_failed`` return.
    """

    def __init__(
        self,
        source: OfferSource,
        *,
        own_key: X25519PrivateKey,
        own_node_id: str,
        pin: Pin = pin_peer,
        limits: EdgeLimits | None = None,
        times: EdgeTimes | None = None,
    ) -> None:
        self._times = times or EdgeTimes()
        self._supply = OfferSupply(source, own_key=own_key, own_node_id=own_node_id, pin=pin)
        self._paths = PathKeeper(self._supply, limits or EdgeLimits(), self._times)
        self._state = EdgeState.CONNECTING
        self._problem: str | None = None
        self._reconnect_count = 0
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed: asyncio.Future[EdgeEndedError] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._running: asyncio.Task[None] | None = None

    async def open(self, *, timeout_seconds: float = 60.0) -> Self:
        """Reach the node for the first time, and listen.

        Raises:
            EdgeEndedError: there is no such node, or it is not the one it was.
            LinkcppError: it was not reached in time, with the reason.
        """
        self._running = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.shield(self._first)
            self._server = await asyncio.start_server(
                self._accept, HOST, 0, limit=CHUNK_BYTES, backlog=64
            )
            self._port = self._server.sockets[0].getsockname()[1]
        except TimeoutError:
            await self.aclose()
            raise LinkcppError(
                f"The node was not reached in {timeout_seconds:g} seconds: "
                f"{self._problem or 'no answer'}.",
                hint="See that `linkcpp join` runs there; `linkcpp discover --hub …` shows it.",
            ) from None
        except BaseException:
            await self.aclose()
            raise
        return self

    @property
    def port(self) -> int:
        """The loopback port; it stays the same."""
        return self._port

    @property
    def url(self) -> str:
        """Where the agent seems to be."""
        return f"http://{HOST}:{self.port}"

    @property
    def token(self) -> str:
        """The bearer token that the agent takes from this edge."""
        assert self._supply.keys is not None  # noqa: S101 - open was awaited
        return self._supply.keys.agent_token()

    def status(self) -> EdgeStatus:
        """Tell what the edge does now."""
        keys, paths = self._supply.keys, self._paths
        path = paths.path if self._state is EdgeState.UP else None
        return EdgeStatus(
            state=self._state,
            node_id=keys.node_id if keys else None,
            edge_id=keys.edge_id if keys else None,
            path=path.kind if path else None,
            gateway_id=path.gateway_id if path else None,
            why=paths.why if path else None,
            rtt_ms=paths.rtt_ms if path else None,
            problem=self._problem,
            reconnect_count=self._reconnect_count,
            change_count=paths.change_count,
            connection_count=paths.connection_count,
            sent_bytes=paths.sent_bytes,
            received_bytes=paths.received_bytes,
        )

    async def wait_failed(self) -> EdgeEndedError:
        """Wait until the edge has ended for good, and return why.

        Raises:
            asyncio.CancelledError: the edge was closed on purpose.
        """
        return await asyncio.shield(self._failed)

    async def aclose(self) -> None:
        """End the port, all connections and the path; also fine when it is closed already."""
        if self._server is not None:
            self._server.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None
            await self._paths.aclose()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await self._supply.close()
        if not self._failed.done():
            self._failed.cancel()
            self._state = EdgeState.CLOSED
        self._first.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._state in (EdgeState.FAILED, EdgeState.CLOSED):
            reset(writer)
            return
        await self._paths.carry(reader, writer)

    async def _run(self) -> None:
        try:
            while True:
                await self._reach()
                self._state, self._problem = EdgeState.UP, None
                if not self._first.done():
                    self._first.set_result(None)
                self._problem = await self._paths.keep()
                self._state = EdgeState.RECONNECTING
                self._reconnect_count += 1
                _log.info("an edge lost its path: %s", self._problem)
        except EdgeEndedError as error:
            await self._fail(error)
        except Exception:
            _log.exception("an edge ended by a defect")
            await self._fail(EdgeEndedError("linkcpp met a defect of its own; its log has it."))

    async def _fail(self, error: EdgeEndedError) -> None:
        self._state, self._problem = EdgeState.FAILED, error.message
        self._failed.set_result(error)
        if not self._first.done():
            self._first.set_exception(error)
        if self._server is not None:
            self._server.close()
        await self._paths.aclose()

    async def _reach(self) -> None:
        """Find a path for the session, as long as it takes."""
        pause_seconds = 0.0
        while True:
            # Many edges may have lost one gateway at the same moment.
            await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311
            pause_seconds = min(
                max(2 * pause_seconds, self._times.first_pause), self._times.longest_pause
            )
            try:
                self._paths.use(await self._paths.reach(await self._supply.fresh()))
            except EdgeEndedError:
                raise
            except LinkcppError as error:
                self._problem = error.message
            except TransportLostError as error:
                self._problem = error.reason
            else:
                return
