"""One worker as the virtual device sees it: its link, what it holds, what was seen of it."""

import select
import socket
import time
from collections.abc import Hashable, Sequence
from enum import StrEnum
from typing import NamedTuple

from linkcpp.dispatch.checks import RowCheck, Trial
from linkcpp.dispatch.routing import Latency
from linkcpp.engine.rpc_socket import limit_receiving, unsent
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

FIRST_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_PROBE_SECONDS = 5.0
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
    CHECKING = "checking"
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
        self.retry_seconds = FIRST_RETRY_SECONDS
        self.has_answered = False
        self.is_removed = False
        self.is_rechecked = False
        self.taught_count = 0
        self.checks: dict[tuple[int, Hashable], RowCheck] = {}
        self.socket: socket.socket | None = None
        self._frames = FrameBuffer(Limits())
        self._outgoing: Sequence[Buffer] = ()
        self._wait_ms = 0.0

    @property
    def is_expected(self) -> bool:
        """Whether it is up, or was and is only being checked once more."""
        return self.state == LinkState.UP or (
            self.state == LinkState.CHECKING and self.is_rechecked
        )

    def has_passed(self, trial: Trial) -> bool:
        """Whether it was checked for this, or holds nothing of the layer."""
        segments = self.welcome.segments if self.welcome else ()
        return (trial.layer, trial.chain.key) in self.checks or not any(
            segment.layer == trial.layer for segment in segments
        )

    def note_answer(self, pairs: int, took_seconds: float, compute_us: int) -> None:
        """Take note of an answer for people and for routing."""
        self.has_answered = True
        self.latency.observe(pairs, took_seconds * 1000)
        self.pair_count += pairs
        self.worker_seconds += compute_us / 1e6
        self.waited_seconds += took_seconds

    @property
    def is_sending(self) -> bool:
        """Whether bytes wait until the socket takes them."""
        return bool(self._outgoing)

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send as much as the socket takes now; ``resume`` sends the rest.

        Raises:
            OSError: the link broke.
        """
        self._outgoing = [*self._outgoing, *parts] if self._outgoing else parts
        self.resume()

    def resume(self) -> None:
        """Send what waits; raises as ``send``."""
        if self.socket is None:
            raise ConnectionError("the link is closed")
        while self._outgoing:
            try:
                sent = self.socket.sendmsg(self._outgoing[:_MOST_BUFFERS], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self.sent_bytes += sent
            self._outgoing = unsent(self._outgoing, sent)

    def receive(self, within_ms: float = 0.0) -> bool:
        """Read what is there, or what comes in time; tell whether there was anything.

        Raises:
            OSError: the link broke or was closed by the worker.
        """
        if self.socket is None:
            raise ConnectionError("the link is closed")
        if within_ms and within_ms != self._wait_ms:
            limit_receiving(self.socket, within_ms / 1000)
            self._wait_ms = within_ms
        try:
            count = self.socket.recv_into(
                self._frames.space(), 0, 0 if within_ms else socket.MSG_DONTWAIT
            )
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
            self._frames, self._outgoing = FrameBuffer(Limits()), ()
            link.sendall(pack_hello(address.token))
            welcome = parse_welcome(self._wait(link, FrameType.WELCOME))
            _check_model(welcome, model_digest)
            for chain_id, chain in chains:
                link.sendall(pack_chain(0, chain_id, chain))
                self._wait(link, FrameType.CHAIN_READY)
            link.sendall(pack_header(FrameType.PING, 0, 0))
            self._wait(link, FrameType.PONG)
            link.setblocking(True)
            self._wait_ms = 0.0
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
        self._outgoing = ()
        if link is not None:
            link.close()


def _check_model(welcome: Welcome, model_digest: str | None) -> None:
    if model_digest is not None and welcome.model_digest != model_digest:
        raise FrameError(ErrorCode.BAD_PAYLOAD, "It holds slabs of another model.")


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
