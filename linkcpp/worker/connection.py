"""A connection between a worker and whoever asks it: a socket, or a stream of a link."""

import socket
from collections.abc import Sequence
from typing import Protocol

from linkcpp.common.closing import Closing
from linkcpp.engine.rpc_socket import block_in_kernel, send_all, unsent
from linkcpp.worker.frames import Buffer

# Linux takes at most 1,024 (IOV_MAX).
_MAX_BUFFERS = 64


class Connection(Protocol):
    """Bytes in order, both ways, for one thread at a time."""

    @property
    def is_sending(self) -> bool:
        """Whether bytes wait, and ``poll`` tells when they can be sent."""
        ...

    def fileno(self) -> int:
        """What ``poll`` can wait for: readable when there may be something to read."""
        ...

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send bytes; what the system does not take at once leaves with ``flush``.

        Raises:
            OSError: the connection is gone.
        """
        ...

    def flush(self) -> None:
        """Send what waits, as far as the system takes it; raises as ``send``."""
        ...

    def send_all(self, parts: Sequence[Buffer], seconds: float) -> None:
        """Send bytes, and wait while the system takes no more.

        Raises:
            OSError: the connection is gone, or the peer does not read them.
        """
        ...

    def receive_into(self, buffer: memoryview, seconds: float = 0.0) -> int:
        """Read what is there, or what comes in time; return how many bytes, 0 for none.

        Raises:
            OSError: the connection is gone, or the peer has closed it.
        """
        ...

    def close(self) -> None:
        """End it; may be called twice."""
        ...


class SocketConnection(Closing):
    """A connected socket."""

    def __init__(self, link: socket.socket) -> None:
        self.socket = link
        self._outgoing: Sequence[Buffer] = ()
        self._wait_seconds = 0.0
        link.setblocking(True)

    @property
    def is_sending(self) -> bool:
        """Whether bytes wait."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """The socket's."""
        return self.socket.fileno()

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send bytes."""
        self._outgoing = [*self._outgoing, *parts] if self._outgoing else parts
        self.flush()

    def flush(self) -> None:
        """Send what waits."""
        while self._outgoing:
            try:
                sent = self.socket.sendmsg(self._outgoing[:_MAX_BUFFERS], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._outgoing = unsent(self._outgoing, sent)

    def send_all(self, parts: Sequence[Buffer], seconds: float) -> None:
        """Send bytes and wait."""
        self._wait_at_most(seconds)
        send_all(self.socket, parts)

    def receive_into(self, buffer: memoryview, seconds: float = 0.0) -> int:
        """Read."""
        if seconds:
            self._wait_at_most(seconds)
        try:
            count = self.socket.recv_into(buffer, 0, 0 if seconds else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionError("the other side closed the connection")
        return count

    def close(self) -> None:
        """Close the socket."""
        self._outgoing = ()
        self.socket.close()

    def _wait_at_most(self, seconds: float) -> None:
        if seconds != self._wait_seconds:
            block_in_kernel(self.socket, seconds)
            self._wait_seconds = seconds
