"""What stands behind a stream at one end, whatever it leads to."""

from typing import Protocol

from linkcpp.link.records import ResetCode


class StreamRefusedError(Exception):
    """This end does not serve the target of a stream; the text tells the peer's user why."""


class StreamPort(Protocol):
    """What a handler needs of the session, for its own stream."""

    def can_write(self) -> bool:
        """Whether ``write`` may be called; if not, ``writable`` of the handler tells when."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes to the peer."""
        ...

    def finish(self) -> None:
        """Send no more."""
        ...

    def abort(self, code: ResetCode = ResetCode.ABORTED, reason: str = "") -> None:
        """End the stream at once; ``reason`` is told to the peer's user."""
        ...

    def taken(self, size_bytes: int) -> None:
        """Tell that bytes of the peer were passed on: the peer may send as many more."""
        ...

    @property
    def descriptor(self) -> int | None:
        """What ``poll`` can wait for, and ``read_now`` then reads; it changes with the path."""
        ...

    def read_now(self) -> bool:
        """Take what came, without the event loop; tell whether there was anything."""
        ...


class StreamHandler(Protocol):
    """What this end does with a stream; the session calls all but ``run``, and they are short."""

    def deliver(self, data: memoryview) -> None:
        """Take bytes of the peer: a window at most beyond what ``StreamPort.taken`` told."""
        ...

    def finish(self) -> None:
        """The peer sends no more."""
        ...

    def abort(self, reason: str, code: int) -> None:
        """The stream is gone; ``code`` is a ``ResetCode`` of the peer, ``reason`` its words."""
        ...

    def writable(self) -> None:
        """The stream takes more."""
        ...

    async def run(self) -> None:
        """Do the work; the stream is forgotten when this returns."""
        ...
