"""The accepting end of a link between two programs, in the program itself.

The machine's agent listens for it: a connection that names the link is handed over as it is, with
the request that came on it, before anything was answered.
"""

import asyncio
import contextlib
import logging
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from linkcpp.common.closing import Closing
from linkcpp.link.accepted import AcceptedLink
from linkcpp.link.blocking import BlockingStream
from linkcpp.link.handlers import StreamHandler, StreamPort, StreamRefusedError
from linkcpp.link.handshake import respond
from linkcpp.link.introduced import PROGRAM_TARGET, IntroducedEnd
from linkcpp.link.records import LinkLimits, LinkTimes
from linkcpp.link.shared_loop import SharedLoop
from linkcpp.link.transport import TransportLostError, WebSocketTransport
from linkcpp.registry.edges import EdgeOffer
from linkcpp.registry.relay import (
    HELLO_DEADLINE_SECONDS,
    PAIRED,
    RelayCloseCode,
    encode_cluster_hello,
)

MAX_HEAD_BYTES = 32 * 1024
# Whoever knows the link's id may dial it, and learns nothing without the key.
_MAX_STRANGERS = 8

_log = logging.getLogger(__name__)


class AcceptedEnd(IntroducedEnd):
    """What the program is told that accepts; at ``door`` its agent hands connections over."""

    door: Path


def new_door() -> Path:
    """Make a place for a door that only this user can reach; its folder is the caller's to remove.

    A path of a socket may have about a hundred characters, which a home folder may exceed.
    """
    return Path(tempfile.mkdtemp(prefix="linkcpp-")) / "door"


def remove_door(door: Path) -> None:
    """Remove a door and its folder; also fine when it is gone."""
    door.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        door.parent.rmdir()


def tell_offer(offer: EdgeOffer, door: Path) -> None:
    """Tell the program behind a door of an offer for its link; raises as ``hand_over``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(offer.model_dump_json().encode(), str(door))


def hand_over(connection: socket.socket, head: bytes, door: Path) -> None:
    """Give a connection to the program behind a door, with what was read from it.

    Raises:
        OSError: there is no program behind it, or it does not take any now.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.connect(str(door))
        socket.send_fds(sender, [head], [connection.fileno()])


class ProgramDoor(Closing):
    """Takes part in one link; ``serve`` is called in a thread of its own with each connection."""

    def __init__(self, end: AcceptedEnd, serve: Callable[[BlockingStream], None]) -> None:
        self._introduction = end.introduction(is_dialler=False)
        self._hello = encode_cluster_hello(end.link_id)
        self._serve = serve
        self._shared = SharedLoop()
        self._streams: set[BlockingStream] = set()
        self._strangers: dict[WebSocketTransport, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._path = end.door
        self._offer: EdgeOffer | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._listener.setblocking(False)
        self._listener.bind(str(end.door))
        self._link = self._shared.run(self._begin())

    def close(self) -> None:
        """End the link and its connections; also fine when it is closed already."""
        if self._is_closed:
            return
        self._is_closed = True
        for stream in list(self._streams):
            stream.close()
        self._shared.run(self._end())
        self._shared.close()
        self._listener.close()
        remove_door(self._path)

    async def _begin(self) -> AcceptedLink:
        self._shared.loop.add_reader(self._listener, self._take_connections)
        return self._make()

    async def _end(self) -> None:
        self._shared.loop.remove_reader(self._listener)
        await self._link.aclose(RelayCloseCode.STOPPING, "the program stops")

    def _make(self) -> AcceptedLink:
        introduction = self._introduction
        return AcceptedLink(
            introduction,
            introduction.peer,
            introduction.peer_key.public_bytes_raw(),
            serve=self._start,
            on_goodbye=self._said_goodbye,
            limits=LinkLimits(),
            times=LinkTimes(),
        )

    def _said_goodbye(self) -> None:
        """End the session; whoever has the key may begin another."""
        ended, self._link = self._link, self._make()
        if self._offer is not None:
            self._link.renew(self._offer)
        self._spawn(ended.aclose(1000, "the other side closed it"))

    def _start(self, target: str, port: StreamPort) -> StreamHandler:
        if target != PROGRAM_TARGET:
            raise StreamRefusedError(f"unknown_target: there is no {target!r} here")
        stream = BlockingStream(self._shared, port)
        self._streams.add(stream)
        threading.Thread(target=self._run, args=(stream,), daemon=True).start()
        return stream

    def _run(self, stream: BlockingStream) -> None:
        try:
            self._serve(stream)
        except (OSError, EOFError):
            pass
        except Exception:
            _log.exception("a connection ended by an internal error")
        finally:
            self._streams.discard(stream)
            stream.close()

    def _take_connections(self) -> None:
        with contextlib.suppress(OSError):
            head, descriptors, _, _ = socket.recv_fds(self._listener, MAX_HEAD_BYTES, 1)
            if not descriptors:
                self._offer = EdgeOffer.model_validate_json(head)
                self._link.renew(self._offer)
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                self._spawn(self._accept(connection, head))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, connection: socket.socket, head: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport = WebSocketTransport.accepting()
            await loop.connect_accepted_socket(lambda: transport, connection)
        except OSError:
            connection.close()
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            self._spawn(oldest.close(RelayCloseCode.FULL, "newer ones take its place"))
        self._strangers[transport] = None
        transport.data_received(head)
        try:
            async with asyncio.timeout(HELLO_DEADLINE_SECONDS):
                hello = await transport.receive()
            if hello != self._hello:
                await transport.close(RelayCloseCode.MALFORMED, "this is another link")
                return
            transport.send(PAIRED)
            agreed = await respond(transport, self._introduction, self._link.answer)
            self._strangers.pop(transport, None)
            await self._link.use(transport, agreed, "direct")
        except TimeoutError:
            await transport.close(RelayCloseCode.HELLO_TIMEOUT, "no hello came")
        except TransportLostError as error:
            _log.info("a path ended: %s", error.reason)
        finally:
            self._strangers.pop(transport, None)
