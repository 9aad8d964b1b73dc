"""One link at the end that was dialled: its session, its paths, and its place at a relay."""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from linkcpp.link.channel import SecureChannel
from linkcpp.link.core import EPOCH_BYTES, LinkCore, Resume
from linkcpp.link.dialing import dial_paired
from linkcpp.link.handshake import Agreed, Introduction, Machine, respond
from linkcpp.link.pump import Serve, StreamPump
from linkcpp.link.records import LinkLimits, LinkTimes
from linkcpp.link.session import SessionError
from linkcpp.link.transport import Transport, TransportLostError
from linkcpp.registry.edges import EdgeOffer
from linkcpp.registry.relay import PAIRING_SECONDS, Hello, RelayCloseCode, encode_hello

# The path in use, one that may replace it, and one that is not known to be dead yet.
_MAX_CHANNELS = 3
_MAX_DIALS = 2
_ALIVE_SECONDS = 2.0
# The coordinator asks every few seconds; a channel is dead where nothing came for longer.
_SILENT_TIMES = 3.0


class AcceptedLink:
    """One link, from its introduction until it is closed or nobody came for a while.

    ``key`` is the peer's static key, by which it is known again; ``None`` before it was met. Links
    that a hub introduced have an ``offer``: then this end waits at the relay that it names.
    """

    def __init__(
        self,
        introduction: Introduction,
        machine: Machine,
        key: bytes | None,
        *,
        serve: Serve,
        on_goodbye: Callable[[], None],
        limits: LinkLimits,
        times: LinkTimes,
        offer: EdgeOffer | None = None,
    ) -> None:
        self.introduction = introduction
        self.machine = machine
        self.key = key
        self.offer = offer
        self.idle_since = monotonic()
        self._serve = serve
        self._on_goodbye = on_goodbye
        self._limits = limits
        self._times = times
        self._next_epoch = os.urandom(EPOCH_BYTES)
        self._pump: StreamPump | None = None
        self._channels: list[SecureChannel] = []
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._wanted = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._was_left = False

    @property
    def is_forgotten(self) -> bool:
        """Whether it had no path for as long as one may be away."""
        times = self._times
        most_seconds = times.left if self._was_left else times.forgotten
        return monotonic() - self.idle_since > most_seconds

    @property
    def path(self) -> str | None:
        """The path in use, in words."""
        return self._pump.channel.path if self._pump and self._pump.channel else None

    @property
    def traffic_bytes(self) -> tuple[int, int]:
        """Bytes of the session's streams sent and received."""
        pump = self._pump
        return (pump.sent_bytes, pump.received_bytes) if pump else (0, 0)

    def renew(self, offer: EdgeOffer) -> None:
        """Take an offer of the hub: be at the relay that it names."""
        self.offer = offer
        url = offer.relay_url
        if url is None or self._is_closed:
            return
        if url not in self._dials:
            self._dial(url)
        elif (channel := self._active) is not None:
            # The coordinator asks for a way, so the one in use may be dead without our knowing.
            self._spawn(self._see_whether_alive(channel))
        else:
            self._wanted.set()

    async def serve(self, transport: Transport, path: str) -> None:
        """Use a transport, whose other side is there, until it ends.

        Raises:
            TransportLostError: who is there is not the peer.
        """
        await self.use(transport, await respond(transport, self.introduction, self.answer), path)

    async def use(self, transport: Transport, agreed: Agreed, path: str) -> None:
        """Use a transport over which hands were shaken, until it ends."""
        channel = SecureChannel(
            transport,
            agreed,
            path=path,
            on_attach=self._attach,
            on_goodbye=lambda: self._said_goodbye(channel),
        )
        self._channels.append(channel)
        for older in [known for known in self._channels if known is not self._active][
            :-_MAX_CHANNELS
        ]:
            self._spawn(older.close(RelayCloseCode.REPLACED, "there are newer paths"))
        try:
            while channel.is_open:
                await asyncio.wait({channel.ended}, timeout=self._times.dead)
                self._was_left = not channel.is_open
                if monotonic() - channel.heard_at > _SILENT_TIMES * self._times.dead:
                    await channel.close(1000, "nothing came from the other side")
        finally:
            self._channels.remove(channel)
            self._left(channel)
            await channel.close()

    async def aclose(self, code: int, reason: str) -> None:
        """End the session and all paths."""
        self._is_closed = True
        for task in self._dials.values():
            task.cancel()
        for channel in list(self._channels):
            await channel.close(code, reason)
        if self._pump is not None:
            await self._pump.aclose()
        await asyncio.gather(*self._dials.values(), *self._closing, return_exceptions=True)

    def _said_goodbye(self, channel: SecureChannel) -> None:
        # A peer that began anew says it late of what it had before.
        if channel is self._active:
            self._on_goodbye()

    @property
    def _active(self) -> SecureChannel | None:
        return self._pump.channel if self._pump is not None else None

    def answer(self, peer: Resume) -> Resume:
        """Say whether the session that the peer has can go on."""
        core = self._pump.core if self._pump is not None else None
        if core is not None and (core.peer_epoch, core.epoch) == (peer.epoch, peer.peer_epoch):
            return core.resume
        return Resume(self._next_epoch, peer.epoch, 0)

    def _attach(self, channel: SecureChannel, wanted: int) -> None:
        """Let a channel carry the session that its handshake spoke of.

        Raises:
            SessionError: that session is over.
        """
        if self._is_closed or channel is self._active:
            raise SessionError("a session cannot be attached here")
        said, peer = channel.agreed.own, channel.agreed.peer
        if said.epoch == self._next_epoch:
            self._begin(peer.epoch)
        pump = self._pump
        if pump is None or pump.core.epoch != said.epoch:
            raise SessionError("the session is over that this path was opened for")
        older = pump.carried_by(channel, wanted)
        channel.carry(pump)
        if older is not None:
            self._spawn(older.close(1000, "another path carries the session"))

    def _begin(self, peer_epoch: bytes) -> None:
        self._end_session()
        core = LinkCore(
            epoch=self._next_epoch, peer_epoch=peer_epoch, opens=False, limits=self._limits
        )
        self._pump = StreamPump(core, serve=self._serve)
        self._next_epoch = os.urandom(EPOCH_BYTES)

    def _end_session(self) -> None:
        pump, self._pump = self._pump, None
        if pump is not None:
            if (channel := pump.uncarried()) is not None:
                self._spawn(channel.close(1000, "another session began"))
            self._spawn(pump.aclose())

    def _left(self, channel: SecureChannel) -> None:
        pump = self._pump
        if pump is None or pump.channel is not channel:
            return
        pump.uncarried()
        self.idle_since = monotonic()
        if pump.is_broken:
            self._end_session()
        url = self.offer.relay_url if self.offer else None
        if url is not None and url not in self._dials and not self._is_closed:
            self._dial(url)

    def _dial(self, url: str) -> None:
        used = self._active.path if self._active else None
        spare = [known for known in self._dials if _relay_path(known) != used]
        for known in spare[: max(0, len(self._dials) + 1 - _MAX_DIALS)]:
            self._dials.pop(known).cancel()
        task = asyncio.create_task(self._stay_at_relay(url))
        self._dials[url] = task
        task.add_done_callback(lambda _: self._dials.get(url) is task and self._dials.pop(url))

    async def _stay_at_relay(self, url: str) -> None:
        """Wait at a relay for the coordinator, again and again while there is no other path."""
        pause_seconds = self._times.first_pause
        while (offer := self.offer) and offer.relay_url == url and offer.expires_at > time.time():
            began = monotonic()
            self._wanted.clear()
            has_met = await self._meet_at_relay(url, offer)
            if self._active is not None:
                return
            if has_met or monotonic() - began > self._times.longest_pause:
                pause_seconds = self._times.first_pause
            # The coordinator asks the hub when it comes to the relay: then nobody pauses.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds * random.uniform(0.5, 1.0)):  # noqa: S311
                    await self._wanted.wait()
            pause_seconds = min(2 * pause_seconds, self._times.longest_pause)

    async def _meet_at_relay(self, url: str, offer: EdgeOffer) -> bool:
        """Be at a relay once, as long as that lasts; returns whether the coordinator came."""
        try:
            transport = await dial_paired(
                url,
                encode_hello(Hello(offer.role, offer.edge_id, offer.ticket)),
                dial_seconds=self._times.dial,
                pairing_seconds=PAIRING_SECONDS + self._times.dial,
            )
            await self.serve(transport, _relay_path(url))
        except TransportLostError:
            return False
        return True

    async def _see_whether_alive(self, channel: SecureChannel) -> None:
        try:
            async with asyncio.timeout(_ALIVE_SECONDS):
                await channel.ping()
        except TimeoutError:
            if monotonic() - channel.heard_at > _ALIVE_SECONDS:
                await channel.close(1000, "the coordinator does not answer on it any more")
        except TransportLostError:
            return

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _relay_path(url: str) -> str:
    return f"relay at {url}"
