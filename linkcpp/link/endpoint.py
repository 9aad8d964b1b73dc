"""The end of a link that dials: streams to one machine, over whatever path works."""

import asyncio
import contextlib
import logging
import random
from time import monotonic
from typing import Self

from linkcpp.common.closing import AsyncClosing
from linkcpp.common.errors import LinkcppError
from linkcpp.link.handlers import StreamHandler, StreamPort
from linkcpp.link.handshake import Machine
from linkcpp.link.offers import LinkEndedError, OfferSource
from linkcpp.link.paths import PathKeeper
from linkcpp.link.pump import MakeHandler
from linkcpp.link.records import CHUNK_BYTES, LinkLimits, LinkTimes
from linkcpp.link.status import ConnectionState, LinkStatus
from linkcpp.link.stream_transport import StreamTransport
from linkcpp.link.supply import Supply
from linkcpp.link.transport import TransportLostError
from linkcpp.registry.relay import RelayCloseCode

_GOODBYE_SECONDS = 5.0

_log = logging.getLogger(__name__)


class LinkEndpoint(AsyncClosing):
    """Opens streams to the machine that ``supply`` leads to.

    A lost path is replaced until the link's patience is at its end (``LinkTimes.patience``, and
    ``refused`` where the machine is there but its agent is not). ``wait_session_lost`` returns when
    streams have been lost with their session, ``wait_failed`` when the link has ended for good.
    """

    def __init__(
        self, supply: Supply, *, limits: LinkLimits | None = None, times: LinkTimes | None = None
    ) -> None:
        self._times = times or LinkTimes()
        self._supply = supply
        self._paths = PathKeeper(supply, limits or LinkLimits(), self._times)
        self._state = ConnectionState.CONNECTING
        self._problem: str | None = None
        self._reconnect_count = 0
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed: asyncio.Future[LinkEndedError] = asyncio.get_running_loop().create_future()
        self._running: asyncio.Task[None] | None = None

    async def open(self, *, timeout_seconds: float = 60.0) -> Self:
        """Reach the other machine for the first time.

        Raises:
            LinkEndedError: there is no such machine, or it is not the one it was.
            LinkcppError: it was not reached in time, with the reason.
        """
        self._running = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.shield(self._first)
        except TimeoutError:
            await self.aclose()
            raise LinkcppError(
                f"The node was not reached in {timeout_seconds:g} seconds: "
                f"{self._problem or 'no answer'}.",
                hint="See that its agent runs there: `linkcpp discover` shows it.",
            ) from None
        except BaseException:
            await self.aclose()
            raise
        return self

    @property
    def peer(self) -> Machine:
        """Who the other machine has proved to be."""
        assert self._paths.peer is not None  # noqa: S101 - open was awaited
        return self._paths.peer

    @property
    def has_ended(self) -> bool:
        """Whether it is of no use any more."""
        return self._state in (ConnectionState.FAILED, ConnectionState.CLOSED)

    @property
    def is_up(self) -> bool:
        """Whether a path carries it now."""
        return self._state is ConnectionState.UP

    def status(self) -> LinkStatus:
        """Tell what the link does now."""
        introduction, paths = self._supply.introduction, self._paths
        path = paths.path if self._state is ConnectionState.UP else None
        return LinkStatus(
            state=self._state,
            node_id=paths.peer.node_id if paths.peer else None,
            link_id=introduction.link_id if introduction else None,
            path=path.kind if path else None,
            gateway_id=path.gateway_id if path else None,
            why=paths.why if path else None,
            rtt_ms=paths.rtt_ms if path else None,
            problem=self._problem,
            reconnect_count=self._reconnect_count,
            change_count=paths.change_count,
            stream_count=paths.stream_count,
            sent_bytes=paths.sent_bytes,
            received_bytes=paths.received_bytes,
        )

    @property
    def direct_urls(self) -> tuple[str, ...]:
        """The addresses of the peer itself that were told last (WebSocket ones)."""
        return self._supply.direct_urls

    def another_edge(self) -> OfferSource | None:
        """Return where offers for one more edge to the peer come from; ``None``: from nowhere."""
        return self._supply.another()

    def start_stream(self, target: str, make_handler: MakeHandler) -> StreamHandler:
        """Open a stream to ``target`` and start its handler.

        Raises:
            ConnectionError: the link has ended, or there are too many streams.
        """
        if self.has_ended:
            raise ConnectionError(self._problem or "the link was closed")
        handler = self._paths.open_stream(target, make_handler)
        if handler is None:
            raise ConnectionError(self._problem or "too many streams are open")
        return handler

    def connect(self, target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to ``target`` for a client of asyncio's; costs no round trip.

        Raises:
            ConnectionError: the link has ended, or there are too many streams.
        """
        reader = asyncio.StreamReader(limit=CHUNK_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)

        def make(port: StreamPort) -> StreamTransport:
            return StreamTransport(port, lambda: protocol, {"peername": (self.peer.node_id, 0)})

        transport = self.start_stream(target, make)
        assert isinstance(transport, StreamTransport)  # noqa: S101 - made above
        loop = asyncio.get_running_loop()
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def ping(self) -> float:
        """Measure one round trip to the other machine, in milliseconds.

        Raises:
            TransportLostError: no path carries the link now.
        """
        return await self._paths.ping()

    async def wait_session_lost(self) -> str:
        """Wait until the session ended with all its streams, and say why in words."""
        failed = asyncio.ensure_future(self.wait_failed())
        lost = asyncio.ensure_future(self._paths.session_lost.wait())
        try:
            await asyncio.wait({failed, lost}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done() and not self._failed.cancelled():
                return self._failed.result().message
            return self._problem or "the node's agent was started again"
        finally:
            failed.cancel()
            lost.cancel()

    async def wait_failed(self) -> LinkEndedError:
        """Wait until the link has ended for good, and return why.

        Raises:
            asyncio.CancelledError: the link was closed on purpose.
        """
        return await asyncio.shield(self._failed)

    async def aclose(self) -> None:
        """End all streams and the path; also fine when it is closed already."""
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
            self._state = ConnectionState.CLOSED
        self._first.cancel()

    async def _run(self) -> None:
        try:
            while True:
                await self._reach()
                self._state, self._problem = ConnectionState.UP, None
                if not self._first.done():
                    self._first.set_result(None)
                self._problem = await self._paths.keep()
                self._state = ConnectionState.RECONNECTING
                self._reconnect_count += 1
                _log.info("a link lost its path: %s", self._problem)
        except LinkEndedError as error:
            await self._fail(error)
        except Exception:
            _log.exception("a link ended by an internal error")
            await self._fail(LinkEndedError("Internal error; the log has the details."))

    async def _fail(self, error: LinkEndedError) -> None:
        self._state, self._problem = ConnectionState.FAILED, error.message
        self._failed.set_result(error)
        if not self._first.done():
            self._first.set_exception(error)
        await self._paths.aclose(error.message)

    async def _reach(self) -> None:
        """Find a path for the session, as long as patience lasts."""
        pause_seconds = 0.0
        began = monotonic()
        while True:
            # Many links may have lost one gateway at the same moment.
            await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311
            pause_seconds = min(
                max(2 * pause_seconds, self._times.first_pause), self._times.longest_pause
            )
            patience_seconds, code = self._times.patience, None
            try:
                self._paths.use(await self._paths.reach(await self._supply.fresh()))
            except LinkEndedError:
                raise
            except LinkcppError as error:
                self._problem = error.message
            except TransportLostError as error:
                self._problem, code = error.reason, error.code
                if error.is_refused:
                    # The machine is there and its agent is not; what the agent ran ended with it.
                    patience_seconds = self._times.refused
            else:
                return
            if not self._first.done():
                self._give_up_unless_awaited(code)
            elif monotonic() - began > patience_seconds:
                raise LinkEndedError(
                    f"The link was not restored in {monotonic() - began:.0f} seconds: "
                    f"{self._problem}.",
                    code="link_lost",
                )

    def _give_up_unless_awaited(self, code: int | None) -> None:
        if self._supply.is_awaited:
            return
        is_stranger = code in (RelayCloseCode.HANDSHAKE_FAILED, RelayCloseCode.UNAUTHORIZED)
        raise LinkEndedError(
            self._problem or "no answer", code="not_introduced" if is_stranger else "unreachable"
        )
