"""A session with what stands behind its streams, whatever path carries it. Both ends use it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from linkcpp.link.channel import SecureChannel
from linkcpp.link.core import LinkCore
from linkcpp.link.handlers import StreamHandler, StreamPort, StreamRefusedError
from linkcpp.link.records import ResetCode
from linkcpp.link.session import SessionError
from linkcpp.link.streams import Aborted, Event, Finished, Opened, Received, Writable

MakeHandler = Callable[[StreamPort], StreamHandler]
# Says what stands behind a target that the peer names; raises StreamRefusedError.
Serve = Callable[[str, StreamPort], StreamHandler]


_log = logging.getLogger(__name__)


class StreamPump:
    """One session. ``serve`` says what a stream of the peer leads to (the end that is dialled)."""

    def __init__(self, core: LinkCore, *, serve: Serve | None = None) -> None:
        self.core = core
        self.channel: SecureChannel | None = None
        self.is_broken = False
        self.sent_bytes = 0
        self.received_bytes = 0
        self._serve = serve
        self._handlers: dict[int, StreamHandler] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def carried_by(self, channel: SecureChannel, peer_wanted: int) -> SecureChannel | None:
        """Go on over a new channel; return the one before, which carries nothing any more.

        Raises:
            SessionError: the peer claims to have what was never sent.
        """
        older = self.uncarried()
        self.core.attach(peer_wanted)
        self.channel = channel
        return older

    def uncarried(self) -> SecureChannel | None:
        """Be without a channel; return the one before."""
        older, self.channel = self.channel, None
        self.core.detach()
        if older is not None:
            older.leave()
        return older

    def next_record(self) -> bytes | None:
        """Return the next record to send."""
        record = self.core.next_record()
        self._dispatch()
        return record

    def receive(self, record: bytes) -> None:
        """Take a record of the peer."""
        try:
            self.core.receive(record)
        except SessionError:
            self.is_broken = True
            raise
        self._dispatch()

    def open(self, target: str, make_handler: MakeHandler) -> StreamHandler | None:
        """Open a stream, and start its handler; ``None`` where there are too many streams."""
        stream = self.core.streams.open(target)
        if stream is None:
            return None
        handler = make_handler(_Port(self, stream))
        self._start(stream, handler)
        self.wake()
        return handler

    async def aclose(self, reason: str = "the link was closed") -> None:
        """End all streams at once, and tell their users why."""
        self.uncarried()
        for handler in list(self._handlers.values()):
            handler.abort(reason, ResetCode.ABORTED)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake(self) -> None:
        """There is something to send."""
        if self.channel is not None:
            self.channel.wake()

    def _dispatch(self) -> None:
        for event in self.core.streams.take_events():
            self._handle(event)

    def _handle(self, event: Event) -> None:
        try:
            self._pass_on(event)
        except Exception:
            # Of this stream's handler: the link and its other streams are well.
            _log.exception("a stream ended by an internal error")
            handler = self._handlers.pop(event.stream, None)
            self.core.streams.abort(event.stream, reason="internal error")
            if handler is not None:
                handler.abort("internal error", ResetCode.ABORTED)

    def _pass_on(self, event: Event) -> None:
        if isinstance(event, Opened):
            self._accept(event)
            return
        handler = self._handlers.get(event.stream)
        if isinstance(event, Received):
            self.received_bytes += len(event.data)
            if handler is not None:
                handler.deliver(event.data)
            else:  # nobody reads it any more
                self.core.streams.abort(event.stream)
        elif handler is None:
            return
        elif isinstance(event, Finished):
            handler.finish()
        elif isinstance(event, Aborted):
            handler.abort(event.reason, event.code)
        elif isinstance(event, Writable):
            handler.writable()

    def _accept(self, opened: Opened) -> None:
        assert self._serve is not None  # noqa: S101 - only the other end opens streams
        port = _Port(self, opened.stream)
        try:
            handler = self._serve(opened.target, port)
        except StreamRefusedError as error:
            port.abort(ResetCode.REFUSED, str(error))
            return
        self._start(opened.stream, handler)

    def _start(self, stream: int, handler: StreamHandler) -> None:
        self._handlers[stream] = handler
        self._spawn(self._run(stream, handler))

    async def _run(self, stream: int, handler: StreamHandler) -> None:
        try:
            await handler.run()
        finally:
            self._handlers.pop(stream, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its stream was reset with the reason


class _Port:
    """One stream of a session, as its handler sees it."""

    def __init__(self, pump: StreamPump, stream: int) -> None:
        self._pump = pump
        self._streams = pump.core.streams
        self._stream = stream

    def can_write(self) -> bool:
        return self._streams.can_write(self._stream)

    def write(self, data: bytes) -> None:
        self._pump.sent_bytes += len(data)
        self._streams.write(self._stream, data)
        self._pump.wake()

    def finish(self) -> None:
        self._streams.finish(self._stream)
        self._pump.wake()

    def abort(self, code: ResetCode = ResetCode.ABORTED, reason: str = "") -> None:
        self._streams.abort(self._stream, code, reason)
        self._pump.wake()

    def taken(self, size_bytes: int) -> None:
        if self._streams.taken(self._stream, size_bytes):
            self._pump.wake()

    @property
    def descriptor(self) -> int | None:
        channel = self._pump.channel
        return channel.descriptor if channel is not None else None

    def read_now(self) -> bool:
        channel = self._pump.channel
        return channel is not None and channel.read_now()
