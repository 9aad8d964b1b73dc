"""One encrypted channel over one transport: the path that a session takes for a while.

A channel exists before a session uses it, so that paths can be measured and compared, and ends with
its transport. Every record is sealed under a counter; one that was altered, repeated, left out or
reordered does not open, which ends the channel before anything of it is used.
"""

import asyncio
import contextlib
import logging
import os
import struct
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from linkcpp.common.text import printable
from linkcpp.link.handshake import Agreed
from linkcpp.link.noise import NoiseError
from linkcpp.link.records import RecordType
from linkcpp.link.session import SessionError
from linkcpp.link.transport import Transport, TransportLostError
from linkcpp.registry.relay import RelayCloseCode

_ATTACH = struct.Struct("<BQ")
_PING = struct.Struct("<B8s")
_MAX_PONGS_WAITING = 64
_CLOSE_SECONDS = 2.0
# A key should not seal much more (RFC 8446, section 5.5, has some 400 GB in records of 16 KiB): the
# session goes on over a new path with new keys.
MAX_SEALED_BYTES = 64 * 2**30

_log = logging.getLogger(__name__)


class Traffic(Protocol):
    """The session that uses a channel."""

    def next_record(self) -> bytes | None:
        """Return the next record to send, or ``None`` while there is none."""
        ...

    def receive(self, record: bytes) -> None:
        """Take a record.

        Raises:
            SessionError: the peer broke the rules.
        """
        ...


class SecureChannel:
    """One channel; ``path`` names it for people. It runs from the start.

    ``ended`` tells why it ended, in words, and ``end_code`` with which close code.
    At the end that was dialled ``on_attach`` is called when the other one wants its session carried
    here, and ``on_goodbye`` when it ends the link for good; without them (at the end that dials)
    such a record breaks the rules.
    """

    def __init__(
        self,
        transport: Transport,
        agreed: Agreed,
        *,
        path: str,
        on_attach: Callable[["SecureChannel", int], None] | None = None,
        on_goodbye: Callable[[], None] | None = None,
    ) -> None:
        self.agreed = agreed
        self.path = path
        self.heard_at = monotonic()
        self.end_code: int | None = None
        self._transport = transport
        self._on_attach = on_attach
        self._on_goodbye = on_goodbye
        self._traffic: Traffic | None = None
        self._control: deque[bytes] = deque()
        self._sending, self._receiving = agreed.keys.sending, agreed.keys.receiving
        self._sealed_bytes = 0
        self._is_busy = False
        self._closing: asyncio.Task[None] | None = None
        self._pings: dict[bytes, tuple[float, asyncio.Future[float]]] = {}
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        transport.deliver_to(self)

    @property
    def is_open(self) -> bool:
        """Whether it still runs."""
        return not self.ended.done()

    def carry(self, traffic: Traffic) -> None:
        """Carry a session from now on."""
        self._traffic = traffic
        self.wake()

    def attach(self, traffic: Traffic, wanted: int) -> None:
        """Carry a session from now on, and have the peer do the same (the coordinator's end)."""
        self._control.append(_ATTACH.pack(RecordType.ATTACH, wanted))
        self.carry(traffic)

    async def say_goodbye(self) -> None:
        """Have the peer end the link for good (the dialling end); best effort."""
        self._control.append(bytes([RecordType.BYE]))
        self.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.shield(self.ended)

    @property
    def descriptor(self) -> int | None:
        """The transport's; see ``Transport.descriptor``."""
        return self._transport.descriptor

    def read_now(self) -> bool:
        """Take what the transport has; see ``Transport.read_now``."""
        return self._transport.read_now()

    def leave(self) -> None:
        """Carry no session any more; what still arrives of it is dropped."""
        self._traffic = None

    async def ping(self) -> float:
        """Measure one round trip to the other machine, in milliseconds.

        Raises:
            TransportLostError: the channel ended meanwhile.
        """
        mark = os.urandom(8)
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._pings[mark] = (monotonic(), answer)
        self._control.append(_PING.pack(RecordType.PING, mark))
        self.wake()
        try:
            waits: set[asyncio.Future[Any]] = {answer, self.ended}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pings.pop(mark, None)
        if not answer.done():
            raise TransportLostError(self.ended.result(), self.end_code)
        return answer.result()

    async def close(self, code: int = 1000, reason: str = "it is not needed any more") -> None:
        """Close the transport and wait until the channel has ended; the peer is told why."""
        self._end(reason, code)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._transport.close(code, reason)
        if self._closing is not None:
            await asyncio.gather(self._closing, return_exceptions=True)

    # What the transport tells.

    def received(self, message: bytes) -> None:
        """Open a record and pass it on, then send what it caused."""
        if self.ended.done():
            return
        self._is_busy = True
        try:
            self._take(self._receiving.decrypt(message))
        except (NoiseError, SessionError) as error:
            self._fail(RelayCloseCode.RECORD_INVALID, str(error))
        except Exception:
            _log.exception("a channel ended by an internal error")
            self._fail(1011, "internal error")
        finally:
            self._is_busy = False
        self.wake()

    def writable(self) -> None:
        """The transport takes messages again."""
        self.wake()

    def lost(self, error: TransportLostError) -> None:
        """The transport is gone."""
        self._fail(error.code or 1006, error.reason)

    def wake(self) -> None:
        """Send what there is to send, as far as the transport takes it."""
        if self._is_busy:  # whoever is at it sends it afterwards
            return
        self._is_busy = True
        try:
            while not (self._transport.is_full or self.ended.done()):
                record = self._next_record()
                if record is None:
                    break
                self._transport.send(self._sending.encrypt(record))
                self._sealed_bytes += len(record)
                if self._sealed_bytes > MAX_SEALED_BYTES:
                    self._fail(1000, "its key has sealed enough")
        except Exception:
            _log.exception("a channel ended by an internal error")
            self._fail(1011, "internal error")
        finally:
            self._is_busy = False

    def _next_record(self) -> bytes | None:
        if self._control:
            return self._control.popleft()
        return self._traffic.next_record() if self._traffic is not None else None

    def _fail(self, code: int, reason: str) -> None:
        """End by itself; the transport is closed beside whatever goes on."""
        if self.ended.done():
            return
        reason = printable(reason, 200)
        self._end(reason, code)
        closing = self._transport.close(code if code != 1006 else 1000, reason)
        self._closing = asyncio.create_task(closing)

    def _end(self, reason: str, code: int) -> None:
        if not self.ended.done():
            self._traffic = None
            self.end_code = code
            self.ended.set_result(reason)

    def _take(self, record: bytes) -> None:
        self.heard_at = monotonic()
        kind = record[0] if record else 0
        if kind in (RecordType.DATA, RecordType.ACK):
            if self._traffic is not None:
                self._traffic.receive(record)
        elif kind == RecordType.PING and len(record) == _PING.size:
            if len(self._control) > _MAX_PONGS_WAITING:
                raise SessionError("pings without end")
            self._control.append(_PING.pack(RecordType.PONG, record[1:]))
        elif kind == RecordType.PONG and len(record) == _PING.size:
            asked_at, answer = self._pings.get(record[1:], (0.0, None))
            if answer is not None and not answer.done():
                answer.set_result((self.heard_at - asked_at) * 1000.0)
        elif kind == RecordType.ATTACH and len(record) == _ATTACH.size and self._on_attach:
            self._on_attach(self, _ATTACH.unpack(record)[1])
        elif kind == RecordType.BYE and len(record) == 1 and self._on_goodbye:
            self._on_goodbye()
        else:
            raise SessionError("a record of a kind that is not known here")
