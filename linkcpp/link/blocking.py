"""One stream of a link for a thread that blocks: the loop of the link runs while it waits."""

import asyncio
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence

from linkcpp.common.closing import Closing
from linkcpp.link.handlers import StreamPort
from linkcpp.link.shared_loop import SharedLoop

# Timers of the loop are late by at most this while a thread waits.
_TIMERS_SECONDS = 0.05

Buffer = bytes | bytearray | memoryview


class BlockingStream(Closing):
    """The handler of a stream, and a connection as threads use it; one thread at a time.

    What is sent leaves at once as far as the system takes it, and the rest while somebody waits or
    the loop's caretaker runs it.
    """

    def __init__(self, shared: SharedLoop, port: StreamPort) -> None:
        self._shared = shared
        self._port = port
        self._received: deque[memoryview] = deque()
        self._end: str | None = None
        self._ended: asyncio.Future[None] = shared.loop.create_future()
        self._is_awaited = False
        # What the caretaker takes from the socket no longer makes that readable: then a bell does.
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._is_rung = False
        self._events = selectors.DefaultSelector()
        for readable in (shared.fileno(), self._bell):
            self._events.register(readable, selectors.EVENT_READ)

    # What the session tells.

    def deliver(self, data: memoryview) -> None:
        """Keep bytes of the peer: a window at most."""
        if self._end is None:
            self._received.append(data)
            self._stop_waiting()

    def finish(self) -> None:
        """The peer sends no more."""
        self._over("the other side closed the connection")

    def abort(self, reason: str, code: int) -> None:
        """The stream is gone."""
        self._over(reason)

    def writable(self) -> None:
        """The stream takes more."""
        self._stop_waiting()

    async def run(self) -> None:
        """Wait until the stream is over."""
        await self._ended

    # What threads use.

    def fileno(self) -> int:
        """What ``poll`` can wait for: readable when there may be something to read."""
        return self._events.fileno()

    @property
    def is_sending(self) -> bool:
        """Whether ``poll`` must wait for room: never, the loop does that."""
        return False

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send bytes; what the system does not take at once leaves later.

        Raises:
            ConnectionError: the stream is over.
        """
        with self._shared.turn():
            self._check_open()
            data = b"".join(parts)
            self._shared.act(lambda: self._port.write(data))

    def flush(self) -> None:
        """Send what waits, as far as the system takes it.

        Raises:
            ConnectionError: the stream is over.
        """
        with self._shared.turn():
            self._shared.step()
            self._check_open()

    def send_all(self, parts: Sequence[Buffer], seconds: float) -> None:
        """Send bytes, and wait until the peer has taken nearly all of them.

        Raises:
            ConnectionError: the stream is over.
            TimeoutError: the peer did not take them in time.
        """
        self.send(parts)
        deadline = time.monotonic() + seconds
        while not self._port.can_write():
            with self._shared.turn():
                self._check_open()
                self._run_until(deadline)
            if time.monotonic() > deadline:
                raise TimeoutError("the other side does not read")

    def receive_into(self, buffer: memoryview, seconds: float = 0.0) -> int:
        """Read what is there, or what comes in time; return how many bytes, 0 for none.

        Raises:
            ConnectionError: the stream is over, and all of it was read.
        """
        deadline = time.monotonic() + seconds if seconds else 0.0
        while True:
            with self._shared.turn():
                if not self._received and self._end is None:
                    self._run_until(deadline)
                if self._received:
                    return self._take(buffer)
                self._check_open()
            if time.monotonic() >= deadline:
                return 0

    def close(self) -> None:
        """End the stream; also fine when it is over."""
        with self._shared.turn():
            if self._end is None:
                self._shared.act(self._port.abort)
                self._over("the connection was closed")
            self._events.close()
            self._bell.close()
            self._ring.close()

    def _take(self, buffer: memoryview) -> int:
        if self._is_rung:
            self._is_rung = False
            self._bell.recv(1)
        count = 0
        while self._received and count < len(buffer):
            data = self._received.popleft()
            size = min(len(data), len(buffer) - count)
            buffer[count : count + size] = data[:size]
            count += size
            if size < len(data):
                self._received.appendleft(data[size:])
        self._shared.act(lambda: self._port.taken(count))
        return count

    def _run_until(self, deadline: float) -> None:
        """Wait until something happens here, a turn is wanted, or time is over."""
        read_now = self._port.read_now
        if self._shared.act(read_now) and (self._received or self._end is not None):
            return
        left = deadline - time.monotonic()
        if left <= 0:
            self._shared.step()
            return
        descriptor = self._port.descriptor
        if descriptor is not None:
            # The event loop takes several times as long to tell that its one socket is readable.
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.register(self._shared.fileno(), select.POLLIN)
            poll.poll(min(left, _TIMERS_SECONDS) * 1000)
            if not (self._shared.act(read_now) and self._received):
                self._shared.step()
            return
        self._is_awaited = True
        self._shared.run_until_stopped(left)
        self._is_awaited = False

    def _over(self, reason: str) -> None:
        if self._end is None:
            self._end = reason
            if not self._ended.done():
                self._ended.set_result(None)
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._is_awaited:
            self._shared.loop.stop()
        elif self._shared.is_cared_for and not self._is_rung:
            self._is_rung = True
            self._ring.send(b"!")

    def _check_open(self) -> None:
        if self._end is not None:
            raise ConnectionError(self._end)
