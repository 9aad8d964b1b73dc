"""The paths of a coordinator's edge: the first that works, then the best, the session kept."""

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from time import monotonic
from typing import Any

from linkcpp.common.errors import LinkcppError
from linkcpp.edge.carrier import CarrierLostError
from linkcpp.edge.choosing import Path, PathKind, RoundTrips, choose
from linkcpp.edge.core import EPOCH_BYTES, NO_EPOCH, EdgeCore, Resume
from linkcpp.edge.exchange import Exchange
from linkcpp.edge.link import Link
from linkcpp.edge.local import reset
from linkcpp.edge.reaching import Reached, Way, direct_ways, open_link, reach_first, relay_ways
from linkcpp.edge.records import EdgeLimits, EdgeTimes
from linkcpp.edge.session import SessionError
from linkcpp.edge.supply import OfferSupply
from linkcpp.registry.edges import EdgeOffer

_PROBE_PINGS = 3
# While this much is on its way, a ping measures the queue and not the path.
_QUIET_BYTES = 128 * 1024


class PathKeeper:
    """One session and the path that carries it."""

    def __init__(self, supply: OfferSupply, limits: EdgeLimits, times: EdgeTimes) -> None:
        self._supply = supply
        self._limits = limits
        self._times = times
        self._epoch = os.urandom(EPOCH_BYTES)
        self._exchange: Exchange | None = None
        self._earlier_bytes = (0, 0)
        self._trips: RoundTrips | None = None
        self._slow = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self.path: Path | None = None
        self.why = ""
        self.change_count = 0

    @property
    def rtt_ms(self) -> float | None:
        """The round trip of the path in use, lately."""
        return self._trips.now_ms if self._trips else None

    @property
    def connection_count(self) -> int:
        """How many connections are carried now."""
        return self._exchange.core.streams.stream_count if self._exchange else 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of connections sent to the node."""
        return self._earlier_bytes[0] + (self._exchange.sent_bytes if self._exchange else 0)

    @property
    def received_bytes(self) -> int:
        """Bytes of connections received from the node."""
        return self._earlier_bytes[1] + (self._exchange.received_bytes if self._exchange else 0)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection to the node's agent."""
        if self._exchange is None or self._exchange.is_broken:
            reset(writer)
            return
        await self._exchange.carry(reader, writer)

    async def reach(self, offer: EdgeOffer) -> Reached:
        """Open the first path of an offer that works.

        Raises:
            CarrierLostError: none does.
        """
        try:
            return await reach_first(
                direct_ways(offer),
                relay_ways(offer),
                lambda way: self._open(way, offer),
                head_start_seconds=self._times.head_start,
            )
        except CarrierLostError as error:
            self._supply.avoid(offer.gateway_id)
            if offer.gateway_id is None or offer.relay_url is not None:
                raise
            # The hub's client has left its address out.
            gateway = offer.gateway_name or offer.gateway_id
            reason = f"{error.reason}; the hub's gateway {gateway} has no address with TLS"
            raise CarrierLostError(reason) from error

    def use(self, reached: Reached) -> None:
        """Carry the session over a path from now on.

        Raises:
            CarrierLostError: the session that the path was opened for is over.
        """
        others = f"; {'; '.join(reached.failures)}" if reached.failures else ""
        self._change(
            reached.way.path, reached.link, f"{reached.way.path}: it answered first{others}"
        )

    async def keep(self) -> str:
        """Stay on the best path until there is none, and say why."""
        tasks = (asyncio.create_task(self._watch()), asyncio.create_task(self._seek()))
        try:
            while True:
                exchange = self._exchange
                link = exchange.link if exchange else None
                if exchange is None or link is None:
                    return "the session is over"
                waits: set[asyncio.Future[Any]] = {link.ended, *tasks}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
                if link.ended.done() and exchange.link is link:
                    return self._lost(exchange, link)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _lost(self, exchange: Exchange, link: Link) -> str:
        exchange.uncarried()
        if self.path is not None:
            self._supply.avoid(self.path.gateway_id)
        self._forget_broken()
        return f"{link.path}: {link.ended.result()}"

    async def aclose(self) -> None:
        """End the session and its path."""
        if self._exchange is not None:
            link = self._exchange.link
            await self._exchange.aclose()
            if link is not None:
                await link.close(1000, "the coordinator closed the edge")
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _open(self, way: Way, offer: EdgeOffer) -> Link:
        keys = self._supply.keys
        assert keys is not None  # noqa: S101 - there is an offer
        return await open_link(way, offer, keys, self._resume(), self._times)

    def _resume(self) -> Resume:
        self._forget_broken()
        if self._exchange is None:
            return Resume(self._epoch, NO_EPOCH, 0)
        return self._exchange.core.resume

    def _change(self, path: Path, link: Link, why: str) -> None:
        """Let a link carry the session: the one that there is, or a new one."""
        agreed = link.agreed
        self._forget_broken()
        if agreed.own.epoch != self._epoch:
            self._close(link)
            raise CarrierLostError("the session was given up meanwhile")
        if self._exchange is None or self._exchange.core.peer_epoch != agreed.peer.epoch:
            self._forget()
            self._exchange = Exchange(
                EdgeCore(
                    epoch=self._epoch,
                    peer_epoch=agreed.peer.epoch,
                    opens=True,
                    limits=self._limits,
                )
            )
        exchange = self._exchange
        try:
            older = exchange.carried_by(link, agreed.peer.wanted)
        except SessionError as error:
            exchange.is_broken = True
            self._close(link)
            raise CarrierLostError(str(error)) from error
        link.attach(exchange, exchange.core.resume.wanted)
        if older is not None:
            self._close(older)
        self.path, self.why, self._trips = path, why, None

    def _forget_broken(self) -> None:
        if self._exchange is not None and self._exchange.is_broken:
            self._epoch = os.urandom(EPOCH_BYTES)
            self._forget()

    def _forget(self) -> None:
        """Give up a session that the node has lost, or that one side broke."""
        if self._exchange is None:
            return
        exchange, self._exchange = self._exchange, None
        sent, received = self._earlier_bytes
        self._earlier_bytes = (sent + exchange.sent_bytes, received + exchange.received_bytes)
        if (link := exchange.uncarried()) is not None:
            self._close(link)
        self._spawn(exchange.aclose())

    def _close(self, link: Link) -> None:
        self._spawn(link.close())

    def _spawn(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _watch(self) -> None:
        """Measure the path in use, and end it where it is dead."""
        while True:
            link = self._exchange.link if self._exchange else None
            if link is not None:
                await self._measure(link)
            await asyncio.sleep(self._times.ping)

    async def _measure(self, link: Link) -> None:
        try:
            async with asyncio.timeout(self._times.dead):
                rtt_ms = await link.ping()
        except CarrierLostError:
            return
        except TimeoutError:
            if monotonic() - link.heard_at >= self._times.dead:
                await link.close(1000, f"nothing came for {self._times.dead:g} seconds")
            return
        exchange = self._exchange
        if exchange is None or exchange.link is not link:
            return
        if self._trips is None:
            self._trips = RoundTrips(rtt_ms)
        elif exchange.core.kept_bytes < _QUIET_BYTES:
            self._trips.add(rtt_ms)
        if self._trips.is_slow:
            self._slow.set()

    async def _seek(self) -> None:
        """Look from time to time, and when the path gets slow, whether another one is better."""
        pause_seconds = self._times.first_probe
        while True:
            self._slow.clear()
            try:
                async with asyncio.timeout(pause_seconds):
                    await self._slow.wait()
            except TimeoutError:
                pass
            is_slow = self._slow.is_set()
            with contextlib.suppress(CarrierLostError, LinkcppError):
                await self._probe(is_slow=is_slow)
            if is_slow:
                await asyncio.sleep(self._times.first_probe)
            pause_seconds = self._times.probe

    async def _probe(self, *, is_slow: bool) -> None:
        """Open another path, compare, and change over where it is better."""
        current, trips = self.path, self._trips
        if current is None or trips is None:
            return
        if is_slow:
            if current.kind is PathKind.RELAY:
                self._supply.avoid(current.gateway_id)
            offer = await self._supply.fresh()
        elif current.kind is PathKind.RELAY:
            offer = await self._supply.usable()
        else:
            return
        ways = [] if current.kind is PathKind.DIRECT else list(direct_ways(offer))
        if is_slow:
            ways += [way for way in relay_ways(offer) if way.path != current]
        if not ways:
            self.why = f"{current}: {trips.now_ms:.1f} ms, and there is no other way"
            return
        await self._compare(current, trips, ways, offer)

    async def _compare(
        self, current: Path, trips: RoundTrips, ways: list[Way], offer: EdgeOffer
    ) -> None:
        try:
            reached = await reach_first(
                ways, (), lambda way: self._open(way, offer), head_start_seconds=0.0
            )
        except CarrierLostError as error:
            self.why = f"{current}: {trips.now_ms:.1f} ms; {error.reason}"
            return
        try:
            async with asyncio.timeout(self._times.dial):
                other_ms = min([await reached.link.ping() for _ in range(_PROBE_PINGS)])
        except TimeoutError:
            self._close(reached.link)
            return
        except BaseException:
            self._close(reached.link)
            raise
        choice = choose(current, trips.now_ms, reached.way.path, other_ms)
        if not choice.changes:
            self.why = choice.why
            self._close(reached.link)
            return
        self._change(reached.way.path, reached.link, choice.why)
        self._trips = RoundTrips(other_ms)
        self.change_count += 1
