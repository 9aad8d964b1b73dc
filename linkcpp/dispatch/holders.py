"""Links to workers: connected and proved by a maintenance thread, used by the dispatching one.

A link that fails, or is late, is closed at once; the maintenance thread connects again and probes
until the worker answers, so a worker that comes back is used again. While a link is up only the
dispatching thread touches its socket.
"""

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.dispatch.routing import Latency
from linkcpp.worker.chain import Chain
from linkcpp.worker.frames import (
    Buffer,
    ErrorCode,
    FrameError,
    FrameType,
    Header,
    Limits,
    Welcome,
    pack_chain,
    pack_header,
    pack_hello,
    parse_error,
    parse_welcome,
)
from linkcpp.worker.link import FrameBuffer

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_PROBE_SECONDS = 5.0
_FIRST_RETRY_SECONDS = 0.2
_MOST_RETRY_SECONDS = 10.0
_MOST_BUFFERS = 64


class WorkerAddress(NamedTuple):
    """How to reach a worker: a TCP port of this machine, maybe the near end of a tunnel."""

    name: str
    host: str
    port: int
    token: str


class LinkState(StrEnum):
    """Whether a worker can be asked."""

    CONNECTING = "connecting"
    UP = "up"
    REFUSED = "refused"


class Holder:
    """One worker: its link, what it holds, and what was seen of it.

    Counters are for people; only the dispatching thread writes them.
    """

    def __init__(self, number: int, address: WorkerAddress) -> None:
        self.number = number
        self.address = address
        self.state = LinkState.CONNECTING
        self.detail = "not connected yet"
        self.welcome: Welcome | None = None
        self.latency = Latency()
        self.pair_count = 0
        self.request_count = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.failure_count = 0
        self.worker_seconds = 0.0
        self.waited_seconds = 0.0
        self.retry_at = 0.0
        self.retry_seconds = _FIRST_RETRY_SECONDS
        self.has_answered = False
        self.is_removed = False
        self.socket: socket.socket | None = None
        self._frames = FrameBuffer(Limits())
        self._outgoing: list[memoryview] = []

    @property
    def is_sending(self) -> bool:
        """Whether bytes wait until the socket takes them."""
        return bool(self._outgoing)

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send as much as the socket takes now; ``resume`` sends the rest.

        Raises:
            OSError: the link broke.
        """
        self._outgoing += [memoryview(part).cast("B") for part in parts if len(part)]
        self.resume()

    def resume(self) -> None:
        """Send what waits; raises as ``send``."""
        if self.socket is None:
            raise ConnectionError("the link is closed")
        waiting = self._outgoing
        while waiting:
            try:
                sent = self.socket.sendmsg(waiting[:_MOST_BUFFERS])
            except BlockingIOError:
                return
            self.sent_bytes += sent
            while waiting and sent >= len(waiting[0]):
                sent -= len(waiting.pop(0))
            if sent:
                waiting[0] = waiting[0][sent:]

    def receive(self) -> bool:
        """Read what is there; tell whether there was anything.

        Raises:
            OSError: the link broke or was closed by the worker.
        """
        if self.socket is None:
            raise ConnectionError("the link is closed")
        try:
            count = self.socket.recv_into(self._frames.space())
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionError("the worker closed the link")
        self.received_bytes += count
        self._frames.received(count)
        return True

    def next_frame(self) -> tuple[Header, memoryview] | None:
        """Return the next whole frame; raises ``FrameError`` as ``FrameBuffer.next``."""
        return self._frames.next()

    def open(self, chains: Sequence[tuple[int, Chain]], model_digest: str | None) -> None:
        """Connect, greet, teach the chains and probe; blocking, for the maintenance thread.

        Raises:
            OSError: it does not work out now.
            FrameError: the worker refuses, or is not for this model.
        """
        address = self.address
        link = socket.create_connection((address.host, address.port), _CONNECT_SECONDS)
        try:
            link.settimeout(_PROBE_SECONDS)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._frames, self._outgoing = FrameBuffer(Limits()), []
            link.sendall(pack_hello(address.token))
            welcome = parse_welcome(self._wait(link, FrameType.WELCOME))
            _check_model(welcome, model_digest)
            for chain_id, chain in chains:
                link.sendall(pack_chain(0, chain_id, chain))
                self._wait(link, FrameType.CHAIN_READY)
            link.sendall(pack_header(FrameType.PING, 0, 0))
            self._wait(link, FrameType.PONG)
            link.setblocking(False)
        except BaseException:
            link.close()
            raise
        self.welcome, self.socket = welcome, link

    def _wait(self, link: socket.socket, kind: FrameType) -> memoryview:
        deadline = time.monotonic() + _PROBE_SECONDS
        while (frame := self._frames.next()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("the worker does not answer")
            count = link.recv_into(self._frames.space())
            if not count:
                raise ConnectionError("the worker closed the link")
            self._frames.received(count)
        header, payload = frame
        if header.kind == FrameType.ERROR:
            raise parse_error(payload)
        if header.kind != kind:
            raise FrameError(
                ErrorCode.BAD_FRAMING, f"The worker answered {header.kind.name}, not {kind.name}."
            )
        return payload

    def close(self) -> None:
        """Close the link; may be called twice."""
        link, self.socket = self.socket, None
        self._outgoing = []
        if link is not None:
            link.close()


def _check_model(welcome: Welcome, model_digest: str | None) -> None:
    if model_digest is not None and welcome.model_digest != model_digest:
        raise FrameError(ErrorCode.BAD_PAYLOAD, "It holds slabs of another model.")


class Holders:
    """All workers. ``on_change`` is called, from any thread, when one comes or goes."""

    def __init__(self, model_digest: str | None, on_change: Callable[[], None]) -> None:
        self._model_digest = model_digest
        self._on_change = on_change
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._holders: dict[int, Holder] = {}
        self._chains: list[tuple[int, Chain]] = []
        self._next_number = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._maintain, daemon=True, name="links")
        self._thread.start()

    def all(self) -> list[Holder]:
        """Return every worker, up or not."""
        with self._lock:
            return list(self._holders.values())

    def get(self, number: int) -> Holder | None:
        """Return a worker by its number."""
        return self._holders.get(number)

    def add(self, address: WorkerAddress) -> Holder:
        """Take a worker in; it is used once it answers.

        Raises:
            LinkcppError: there is one of that name.
        """
        with self._lock:
            if any(holder.address.name == address.name for holder in self._holders.values()):
                raise LinkcppError(f"There is a worker {address.name} already.")
            holder = Holder(self._next_number, address)
            self._next_number += 1
            self._holders[holder.number] = holder
        self._wake.set()
        return holder

    def remove(self, name: str) -> None:
        """Do without a worker from now on.

        Raises:
            LinkcppError: there is none of that name.
        """
        with self._lock:
            for holder in self._holders.values():
                if holder.address.name == name:
                    holder.is_removed = True
                    break
            else:
                raise LinkcppError(f"There is no worker {name}.")
        self._on_change()

    def retire(self) -> None:
        """Close the links of workers that were removed; while nobody is being asked."""
        with self._lock:
            for holder in [entry for entry in self._holders.values() if entry.is_removed]:
                if holder.state == LinkState.UP:
                    holder.close()
                    holder.state = LinkState.CONNECTING
                    del self._holders[holder.number]
        self._wake.set()

    def teach(self, chain_id: int, chain: Chain) -> None:
        """Send a chain to every worker that is up, and to all that come later."""
        with self._lock:
            self._chains.append((chain_id, chain))
            up = [holder for holder in self._holders.values() if holder.state == LinkState.UP]
        for holder in up:
            try:
                holder.send([pack_chain(0, chain_id, chain)])
            except OSError as error:
                self.fail(holder, str(error))

    def fail(self, holder: Holder, why: str) -> None:
        """Close a link that failed and let the maintenance thread try again."""
        with self._lock:
            if holder.state != LinkState.UP:
                return
            holder.close()
            holder.failure_count += 1
            holder.state, holder.detail = LinkState.CONNECTING, why
            if holder.has_answered:
                holder.retry_seconds = _FIRST_RETRY_SECONDS
            else:
                # It greets well but never answers: it may cost a deadline ever more seldom.
                holder.retry_seconds = min(2 * holder.retry_seconds, _MOST_RETRY_SECONDS)
            holder.retry_at = time.monotonic() + holder.retry_seconds
        _log.warning("worker %s: %s", holder.address.name, why)
        self._on_change()
        self._wake.set()

    def close(self) -> None:
        """End all links."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()
        for holder in self.all():
            holder.close()

    def _maintain(self) -> None:
        while not self._is_closing:
            now = time.monotonic()
            due = []
            wait = _MOST_RETRY_SECONDS
            for holder in self.all():
                if holder.state == LinkState.UP:
                    continue
                if holder.is_removed:
                    with self._lock:
                        self._holders.pop(holder.number, None)
                elif holder.retry_at <= now:
                    due.append(holder)
                else:
                    wait = min(wait, holder.retry_at - now)
            for holder in due:
                self._try(holder)
            if not due:
                self._wake.wait(wait)
                self._wake.clear()

    def _try(self, holder: Holder) -> None:
        taught = list(self._chains)
        try:
            holder.open(taught, self._model_digest)
        except (OSError, FrameError) as error:
            is_refusal = isinstance(error, FrameError)
            holder.state = LinkState.REFUSED if is_refusal else LinkState.CONNECTING
            holder.detail = error.message if isinstance(error, FrameError) else str(error)
            holder.retry_at = time.monotonic() + holder.retry_seconds
            holder.retry_seconds = min(2 * holder.retry_seconds, _MOST_RETRY_SECONDS)
            return
        with self._lock:
            # Chains learned meanwhile: the socket takes them without waiting.
            for chain_id, chain in self._chains[len(taught) :]:
                with contextlib.suppress(OSError):
                    holder.send([pack_chain(0, chain_id, chain)])
            holder.has_answered = False
            # What was measured before it failed says little of what it is now.
            holder.latency.score = 0.0
            holder.state, holder.detail = LinkState.UP, ""
        _log.info("worker %s is up", holder.address.name)
        self._on_change()


def wait_for_links(holders: Sequence[Holder], timeout_ms: float) -> list[Holder]:
    """Return the holders whose sockets can be read, or written where bytes wait."""
    poll = select.poll()
    by_descriptor = {}
    for holder in holders:
        if holder.socket is None:
            continue
        descriptor = holder.socket.fileno()
        by_descriptor[descriptor] = holder
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if holder.is_sending else 0))
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(timeout_ms)]
