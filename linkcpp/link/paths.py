"""The paths of a link at the end that dials: the first that works, then the best."""

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from time import monotonic
from typing import Any

from linkcpp.common.errors import LinkcppError
from linkcpp.link.channel import SecureChannel
from linkcpp.link.choosing import Path, PathKind, RoundTrips, choose
from linkcpp.link.core import EPOCH_BYTES, NO_EPOCH, LinkCore, Resume
from linkcpp.link.dialing import Reached, Way, Ways, open_channel, reach_first
from linkcpp.link.handlers import StreamHandler
from linkcpp.link.handshake import Machine
from linkcpp.link.offers import LinkEndedError
from linkcpp.link.pump import MakeHandler, StreamPump
from linkcpp.link.records import LinkLimits, LinkTimes
from linkcpp.link.session import SessionError
from linkcpp.link.supply import Supply
from linkcpp.link.transport import TransportLostError

_PROBE_PINGS = 3
# While this much is on its way, a ping measures the queue and not the path.
_QUIET_BYTES = 128 * 1024


class PathKeeper:
    """One session and the path that carries it."""

    def __init__(self, supply: Supply, limits: LinkLimits, times: LinkTimes) -> None:
        self._supply = supply
        self._limits = limits
        self._times = times
        self._epoch = os.urandom(EPOCH_BYTES)
        self._pump: StreamPump | None = None
        self._peer: Machine | None = None
        self._earlier_bytes = (0, 0)
        self._trips: RoundTrips | None = None
        self._slow = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self.session_lost: asyncio.Event = asyncio.Event()
        self.path: Path | None = None
        self.why = ""
        self.change_count = 0

    @property
    def rtt_ms(self) -> float | None:
        """The round trip of the path in use, lately."""
        return self._trips.now_ms if self._trips else None

    @property
    def stream_count(self) -> int:
        """How many streams there are now."""
        return self._pump.core.streams.stream_count if self._pump else 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of streams sent to the peer."""
        return self._earlier_bytes[0] + (self._pump.sent_bytes if self._pump else 0)

    @property
    def received_bytes(self) -> int:
        """Bytes of streams received from the peer."""
        return self._earlier_bytes[1] + (self._pump.received_bytes if self._pump else 0)

    @property
    def peer(self) -> Machine | None:
        """Who the peer has proved to be."""
        return self._peer

    def open_stream(self, target: str, make_handler: MakeHandler) -> StreamHandler | None:
        """Open a stream; ``None`` where there is no session, or too many streams."""
        if self._pump is None or self._pump.is_broken:
            return None
        return self._pump.open(target, make_handler)

    async def ping(self) -> float:
        """Measure one round trip on the path in use, in milliseconds.

        Raises:
            TransportLostError: there is none, or it was lost meanwhile.
        """
        channel = self._pump.channel if self._pump else None
        if channel is None:
            raise TransportLostError("no path carries the link now")
        return await channel.ping()

    async def reach(self, ways: Ways) -> Reached:
        """Open the first path that works.

        Raises:
            TransportLostError: none does.
        """
        try:
            return await reach_first(
                (ways.direct, ways.relay, ways.last),
                self._open,
                head_start_seconds=self._times.head_start,
            )
        except TransportLostError as error:
            self._supply.avoid(ways.gateway_id)
            if ways.gateway_id is None or ways.relay:
                raise
            # The hub's client has left its address out.
            gateway = ways.gateway_name or ways.gateway_id
            reason = f"{error.reason}; the hub's gateway {gateway} has no address with TLS"
            raise TransportLostError(reason) from error

    def use(self, reached: Reached) -> None:
        """Carry the session over a path from now on.

        Raises:
            TransportLostError: the session that the path was opened for is over.
        """
        reasons = () if reached.is_only_way else ("it answered first", *reached.failures)
        why = f"{reached.way.path}: {'; '.join(reasons)}" if reasons else str(reached.way.path)
        self._change(reached.way.path, reached.channel, why)

    async def keep(self) -> str:
        """Stay on the best path until there is none, and say why."""
        tasks = (asyncio.create_task(self._watch()), asyncio.create_task(self._seek()))
        try:
            while True:
                pump = self._pump
                channel = pump.channel if pump else None
                if pump is None or channel is None:
                    return "the session is over"
                waits: set[asyncio.Future[Any]] = {channel.ended, *tasks}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
                if channel.ended.done() and pump.channel is channel:
                    return self._lost(pump, channel)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _lost(self, pump: StreamPump, channel: SecureChannel) -> str:
        pump.uncarried()
        if self.path is not None:
            self._supply.avoid(self.path.gateway_id)
        self._forget_broken()
        return f"{channel.path}: {channel.ended.result()}"

    async def aclose(self, reason: str = "the link was closed") -> None:
        """End the session and its path."""
        if self._pump is not None:
            channel = self._pump.channel
            await self._pump.aclose(reason)
            if channel is not None:
                await channel.say_goodbye()
                await channel.close(1000, "the link was closed")
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _open(self, way: Way) -> SecureChannel:
        introduction = self._supply.introduction
        assert introduction is not None  # noqa: S101 - there are ways
        channel = await open_channel(way, introduction, self._resume(), self._times)
        try:
            self._supply.check(channel.agreed.machine, channel.agreed.peer_key)
        except LinkEndedError as error:
            await channel.close(1000, "it is another machine than before")
            # The right one may answer at another address.
            raise TransportLostError(error.message, is_refused=True) from error
        return channel

    def _resume(self) -> Resume:
        self._forget_broken()
        if self._pump is None:
            return Resume(self._epoch, NO_EPOCH, 0)
        return self._pump.core.resume

    def _change(self, path: Path, channel: SecureChannel, why: str) -> None:
        """Let a channel carry the session: the one that there is, or a new one."""
        agreed = channel.agreed
        self._forget_broken()
        if agreed.own.epoch != self._epoch:
            self._close(channel)
            raise TransportLostError("the session was given up meanwhile")
        self._peer = agreed.machine
        if self._pump is None or self._pump.core.peer_epoch != agreed.peer.epoch:
            self._forget()
            self._pump = StreamPump(
                LinkCore(
                    epoch=self._epoch,
                    peer_epoch=agreed.peer.epoch,
                    opens=True,
                    limits=self._limits,
                )
            )
        pump = self._pump
        try:
            older = pump.carried_by(channel, agreed.peer.wanted)
        except SessionError as error:
            pump.is_broken = True
            self._close(channel)
            raise TransportLostError(str(error)) from error
        channel.attach(pump, pump.core.resume.wanted)
        if older is not None:
            self._close(older)
        self.path, self.why, self._trips = path, why, None

    def _forget_broken(self) -> None:
        if self._pump is not None and self._pump.is_broken:
            self._epoch = os.urandom(EPOCH_BYTES)
            self._forget()

    def _forget(self) -> None:
        """Give up a session that the node has lost, or that one side broke."""
        if self._pump is None:
            return
        self.session_lost.set()
        pump, self._pump = self._pump, None
        sent, received = self._earlier_bytes
        self._earlier_bytes = (sent + pump.sent_bytes, received + pump.received_bytes)
        if (channel := pump.uncarried()) is not None:
            self._close(channel)
        self._spawn(pump.aclose())

    def _close(self, channel: SecureChannel) -> None:
        self._spawn(channel.close())

    def _spawn(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _watch(self) -> None:
        """Measure the path in use, and end it where it is dead."""
        while True:
            channel = self._pump.channel if self._pump else None
            if channel is not None:
                await self._measure(channel)
            await asyncio.sleep(self._times.ping)

    async def _measure(self, channel: SecureChannel) -> None:
        try:
            async with asyncio.timeout(self._times.dead):
                rtt_ms = await channel.ping()
        except TransportLostError:
            return
        except TimeoutError:
            if monotonic() - channel.heard_at >= self._times.dead:
                await channel.close(1000, f"nothing came for {self._times.dead:g} seconds")
            return
        pump = self._pump
        if pump is None or pump.channel is not channel:
            return
        if self._trips is None:
            self._trips = RoundTrips(rtt_ms)
        elif pump.core.kept_bytes < _QUIET_BYTES:
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
            with contextlib.suppress(TransportLostError, LinkcppError):
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
            offered = await self._supply.fresh()
        elif current.kind is PathKind.RELAY:
            offered = await self._supply.usable()
        else:
            return
        ways = [] if current.kind is PathKind.DIRECT else list(offered.direct)
        if is_slow or current.is_last_resort:
            ways += [way for way in offered.relay if way.path != current]
        if not ways:
            self.why = f"{current}: {trips.now_ms:.1f} ms, and there is no other way"
            return
        await self._compare(current, trips, ways)

    async def _compare(self, current: Path, trips: RoundTrips, ways: list[Way]) -> None:
        try:
            reached = await reach_first((ways,), self._open, head_start_seconds=0.0)
        except TransportLostError as error:
            self.why = f"{current}: {trips.now_ms:.1f} ms; {error.reason}"
            return
        try:
            async with asyncio.timeout(self._times.dial):
                other_ms = min([await reached.channel.ping() for _ in range(_PROBE_PINGS)])
        except TimeoutError:
            self._close(reached.channel)
            return
        except BaseException:
            self._close(reached.channel)
            raise
        choice = choose(current, trips.now_ms, reached.way.path, other_ms)
        if not choice.changes:
            self.why = choice.why
            self._close(reached.channel)
            return
        self._change(reached.way.path, reached.channel, choice.why)
        self._trips = RoundTrips(other_ms)
        self.change_count += 1
