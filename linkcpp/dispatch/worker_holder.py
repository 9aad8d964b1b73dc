"""A worker as a holder: asked over compute frames, here or over a link."""

import functools
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.dispatch.holder import Answer, Holder, check_model
from linkcpp.engine.rpc_server import LOOPBACK
from linkcpp.link.introduced import DialledEnd, ProgramLink
from linkcpp.link.status import link_way
from linkcpp.worker.chain import Chain, KeyedChain
from linkcpp.worker.connection import Connection, SocketConnection
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
_COMPUTE, _F32 = FrameType.COMPUTE, DataType.F32


class WorkerAddress(NamedTuple):
    """How to reach a worker: at a TCP port of this machine, or over a link to another one."""

    name: str
    token: str
    host: str = LOOPBACK
    port: int = 0
    link: DialledEnd | None = None

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
        self._connection: Connection | None = None
        self._program_link: ProgramLink | None = None
        self._asked: dict[int, tuple[int, int]] = {}

    @property
    def is_sending(self) -> bool:
        """Whether bytes wait; see ``Holder.is_sending``."""
        return self._connection is not None and self._connection.is_sending

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
        if self._connection is None:
            raise ConnectionError("the link is closed")
        self._connection.send(parts)
        self.sent_bytes += sum(map(len, parts))

    def resume(self) -> None:
        """Send what waits; see ``Holder.resume``."""
        if self._connection is None:
            raise ConnectionError("the link is closed")
        if self._connection.is_sending:
            self._connection.flush()

    def receive(self, within_ms: float = 0.0) -> bool:
        """Read once; see ``Holder.receive``."""
        if self._connection is None:
            raise ConnectionError("the link is closed")
        count = self._connection.receive_into(self._frames.space(), within_ms / 1000)
        self.received_bytes += count
        self._frames.received(count)
        return count > 0

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
        connection = self._connect()
        try:
            self._frames = FrameBuffer(Limits())
            connection.send_all([pack_hello(self._address.token)], _PROBE_SECONDS)
            welcome = parse_welcome(self._wait(connection, FrameType.WELCOME))
            check_model(welcome, model_digest)
            for chain_id, chain in chains:
                connection.send_all([pack_chain(0, chain_id, chain)], _PROBE_SECONDS)
                self._wait(connection, FrameType.CHAIN_READY)
            connection.send_all([pack_header(FrameType.PING, 0, 0)], _PROBE_SECONDS)
            self._wait(connection, FrameType.PONG)
        except BaseException:
            connection.close()
            self._close_link()
            raise
        self.welcome, self.link, self._connection = welcome, connection, connection

    def _connect(self) -> Connection:
        address = self._address
        if address.link is not None:
            try:
                self._program_link = ProgramLink.dial(
                    address.link, timeout_seconds=_CONNECT_SECONDS
                )
            except LinkcppError as error:
                raise ConnectionError(error.message) from error
            return self._program_link.stream
        link = socket.create_connection((address.host, address.port), _CONNECT_SECONDS)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return SocketConnection(link)

    def _wait(self, connection: Connection, kind: FrameType) -> memoryview:
        deadline = time.monotonic() + _PROBE_SECONDS
        while (frame := self._frames.next()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the worker does not answer")
            self._frames.received(connection.receive_into(self._frames.space(), left))
        header, payload = frame
        if header.kind == FrameType.ERROR:
            raise parse_error(payload)
        if header.kind != kind:
            raise FrameError(
                ErrorCode.BAD_FRAMING, f"The worker answered {header.kind.name}, not {kind.name}."
            )
        return payload

    def change_link(self, link: DialledEnd) -> None:
        """Take other ways to the same worker; from any thread."""
        self._address = self._address._replace(link=link)
        program_link = self._program_link
        if program_link is not None:
            program_link.update(link)

    def way(self) -> str | None:
        """Say which way the link to it takes; see ``Holder.way``."""
        status = self._program_link.status() if self._program_link is not None else None
        return link_way(status) if status is not None else None

    def close(self) -> None:
        """Close the link; see ``Holder.close``."""
        connection, self.link, self._connection = self._connection, None, None
        self._asked.clear()
        if connection is not None:
            connection.close()
        self._close_link()

    def _close_link(self) -> None:
        link, self._program_link = self._program_link, None
        if link is not None:
            # It says goodbye and waits for that, and tokens wait for whoever closes a holder.
            threading.Thread(target=link.close, daemon=True).start()


def _number_of(chain: KeyedChain) -> int:
    assert isinstance(chain.key, int)  # noqa: S101 - chains have numbers on links
    return chain.key
