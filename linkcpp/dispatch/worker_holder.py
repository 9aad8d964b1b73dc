"""A worker as a holder: asked over compute frames, here or at the far end of a tunnel."""

import functools
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from linkcpp.dispatch.holder import Answer, Holder, check_model
from linkcpp.engine.rpc_socket import limit_receiving, unsent
from linkcpp.worker.chain import Chain, KeyedChain
from linkcpp.worker.frames import (
    COMPUTE,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Buffer,
    Compute,
    DataType,
    ErrorCode,
    FrameError,
    FrameType,
    Limits,
    Pairs,
    TokenPairs,
    pack_chain,
    pack_compute,
    pack_header,
    pack_hello,
    parse_error,
    parse_row_bytes,
    parse_welcome,
)
from linkcpp.worker.link import FrameBuffer

_CONNECT_SECONDS = 5.0
_PROBE_SECONDS = 5.0
_MAX_BUFFERS = 64
_COMPUTE, _F32 = FrameType.COMPUTE, DataType.F32


class WorkerAddress(NamedTuple):
    """How to reach a worker: a TCP port of this machine, maybe the near end of a tunnel."""

    name: str
    host: str
    port: int
    token: str

    def holder(self, number: int) -> Holder:
        """Make the holder with this number."""
        return WorkerHolder(number, self)


def pack_token(request_id: int, chain_id: int, token: TokenPairs) -> list[Buffer]:
    """Write COMPUTE for one token: one row, as f32 bytes, for all experts."""
    layer, expert_ids, row = token
    pairs, row_bytes = len(expert_ids), len(row)
    head = _token_head(pairs)
    size_bytes = head.size - HEADER_BYTES + row_bytes
    start = head.pack(
        *(MAGIC, VERSION, _COMPUTE, 0, request_id, size_bytes),
        *(chain_id, layer, 1, pairs, row_bytes // 4, _F32, _F32, 1),
        *expert_ids,
    )
    return [start, row]


@functools.cache
def _token_head(pairs: int) -> struct.Struct:
    """Header, head of COMPUTE, a row index of zeros, expert ids."""
    return struct.Struct(f"{HEADER.format}{COMPUTE.format[1:]}{4 * pairs}x{pairs}i")


class WorkerHolder(Holder):
    """A worker that is asked by frames."""

    def __init__(self, number: int, address: WorkerAddress) -> None:
        super().__init__(number, address.name)
        self._address = address
        self._frames = FrameBuffer(Limits())
        self._outgoing: Sequence[Buffer] = ()
        self._asked: dict[int, tuple[int, int]] = {}
        self._wait_ms = 0.0

    @property
    def is_sending(self) -> bool:
        """Whether bytes wait until the socket takes them."""
        return bool(self._outgoing)

    def teach(self, chain_id: int, chain: Chain) -> None:
        """Send it; see ``Holder.teach``."""
        self._send([pack_chain(0, chain_id, chain)])

    def ask(self, number: int, chain: KeyedChain, pairs: Pairs) -> None:
        """Send COMPUTE; see ``Holder.ask``."""
        self._asked[number] = len(pairs.expert_ids), chain.output_width
        self._send(pack_compute(number, Compute(_number_of(chain), pairs)))

    def ask_token(self, number: int, chain: KeyedChain, token: TokenPairs) -> None:
        """Send COMPUTE; see ``Holder.ask_token``."""
        self._asked[number] = len(token.expert_ids), chain.output_width
        self._send(pack_token(number, _number_of(chain), token))

    def forget(self, number: int) -> None:
        """See ``Holder.forget``."""
        self._asked.pop(number, None)

    def _send(self, parts: Sequence[Buffer]) -> None:
        self._outgoing = [*self._outgoing, *parts] if self._outgoing else parts
        self.resume()

    def resume(self) -> None:
        """Send what waits; see ``Holder.resume``."""
        if self.socket is None:
            raise ConnectionError("the link is closed")
        while self._outgoing:
            try:
                sent = self.socket.sendmsg(self._outgoing[:_MAX_BUFFERS], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self.sent_bytes += sent
            self._outgoing = unsent(self._outgoing, sent)

    def receive(self, within_ms: float = 0.0) -> bool:
        """Read once; see ``Holder.receive``."""
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

    def next_answer(self) -> Answer | None:
        """Return the next ROWS; see ``Holder.next_answer``. Answers to nothing are passed over."""
        while (frame := self._frames.next()) is not None:
            header, payload = frame
            number = header.request_id
            if header.kind == FrameType.ROWS and number in self._asked:
                rows, compute_us = parse_row_bytes(payload, self._asked.pop(number))
                return Answer(number, rows, compute_us)
            if header.kind == FrameType.ERROR and (number == 0 or number in self._asked):
                raise parse_error(payload)
        return None

    def open(self, chains: Sequence[tuple[int, Chain]], model_digest: str | None) -> None:
        """Connect, greet, teach the chains and probe; see ``Holder.open``."""
        address = self._address
        link = socket.create_connection((address.host, address.port), _CONNECT_SECONDS)
        try:
            link.settimeout(_PROBE_SECONDS)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._frames = FrameBuffer(Limits())
            link.sendall(pack_hello(address.token))
            welcome = parse_welcome(self._wait(link, FrameType.WELCOME))
            check_model(welcome, model_digest)
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
        """Close the link; see ``Holder.close``."""
        link, self.socket = self.socket, None
        self._outgoing = ()
        self._asked.clear()
        if link is not None:
            link.close()


def _number_of(chain: KeyedChain) -> int:
    assert isinstance(chain.key, int)  # noqa: S101 - chains have numbers on links
    return chain.key
