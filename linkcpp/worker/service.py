"""The worker's listening end: answers compute frames of authenticated peers.

One thread a link; one computation at a time. A peer may lie, stall or die: it loses at most its own
link. An error of the engine is told to every peer and ends the service.
"""

import functools
import socket
import threading
import time
from collections.abc import Callable, Sequence

from linkcpp.common.errors import LinkcppError
from linkcpp.common.threaded_server import ThreadedServer
from linkcpp.engine.wire import WireError
from linkcpp.worker.chain import KeyedChain
from linkcpp.worker.compute import ExpertCompute
from linkcpp.worker.connection import Connection, SocketConnection
from linkcpp.worker.frames import (
    ENDING_CODES,
    Buffer,
    ComputeHead,
    ErrorCode,
    FrameError,
    FrameType,
    Header,
    Limits,
    Welcome,
    check_hello,
    pack_error,
    pack_header,
    pack_rows,
    pack_welcome,
    parse_chain,
    parse_compute,
    parse_compute_head,
    parse_token,
)
from linkcpp.worker.link import FrameBuffer

MAX_LINKS = 32
_MAX_CHAINS = 64
_HELLO_SECONDS = 5.0
# A peer that stops in the middle of a frame, or does not read its answers, is cut off after this.
_STALL_SECONDS = 30.0
_HELLO_LIMITS = Limits(frame_bytes=1 << 12)


class WorkerService:
    """Serves on a listening socket until ``stop``.

    ``failure`` tells afterwards why it ended by itself, if it did.
    """

    def __init__(self, compute: ExpertCompute, welcome: Welcome, token: str) -> None:
        self._compute = compute
        self._compute_lock = threading.Lock()
        self._welcome = welcome
        self._token = token
        self._links = ThreadedServer(self._serve_link, MAX_LINKS, _refuse)
        self.failure: LinkcppError | None = None

    def serve(self, listener: socket.socket) -> None:
        """Accept links until ``stop`` or a failure of the engine."""
        self._links.serve(listener)

    def stop(self) -> None:
        """End every link and the service; may be called from any thread and more than once."""
        self._links.stop()

    def serve_connection(
        self, connection: Connection, let_in: Callable[[], None] = lambda: None
    ) -> None:
        """Answer one peer until it leaves; ``let_in`` is called once it has shown the token.

        Raises:
            OSError: it left, or stopped in the middle of a frame.
        """
        _Link(self, connection, self._welcome, self._token).run(let_in)

    def _serve_link(self, link: socket.socket) -> None:
        self.serve_connection(SocketConnection(link), lambda: self._links.let_in(link))

    def compute(self, chain: KeyedChain, payload: memoryview, head: ComputeHead) -> list[Buffer]:
        """Do what a COMPUTE payload asks; return the parts of ROWS without its request id."""
        run = self._prepare(chain, payload, head)
        with self._compute_lock:
            if self.failure is not None:
                raise FrameError(ErrorCode.ENGINE_FAILED, self.failure.message)
            began = time.perf_counter()
            try:
                rows = run()
            except WireError as error:
                self.failure = error
                self.stop()
                raise FrameError(ErrorCode.ENGINE_FAILED, error.message) from error
            seconds = time.perf_counter() - began
        shape = (head.pair_count, chain.output_width)
        return pack_rows(rows, shape, round(seconds * 1e6), head.answer_type)

    def _prepare(
        self, chain: KeyedChain, payload: memoryview, head: ComputeHead
    ) -> Callable[[], Buffer]:
        token = parse_token(payload, head, chain)
        if token is not None:
            return functools.partial(self._compute.compute_token, chain, token)
        pairs = parse_compute(payload, head, chain).pairs
        return functools.partial(self._compute.compute, chain, pairs)


class _Link:
    """One peer."""

    def __init__(
        self, service: WorkerService, connection: Connection, welcome: Welcome, token: str
    ) -> None:
        self._service = service
        self._connection = connection
        self._welcome = welcome
        self._token = token
        self._frames = FrameBuffer(_HELLO_LIMITS)
        self._chains: dict[int, KeyedChain] = {}

    def run(self, let_in: Callable[[], None]) -> None:
        try:
            self._greet(let_in)
            while True:
                header, payload = self._receive()
                self._answer(header, payload)
        except FrameError as error:
            self._send([pack_error(0, error.code, error.message)])

    def _greet(self, let_in: Callable[[], None]) -> None:
        # The whole greeting has one deadline, however its bytes trickle in.
        deadline = time.monotonic() + _HELLO_SECONDS
        while (frame := self._frames.next()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise FrameError(ErrorCode.BAD_TOKEN, "HELLO did not come in time.")
            self._read_some(left)
        check_hello(*frame, self._token)
        let_in()
        if not self._frames.is_between_frames:
            raise FrameError(ErrorCode.BAD_FRAMING, "A frame came before WELCOME was sent.")
        self._send([pack_welcome(self._welcome)])
        self._frames = FrameBuffer(self._welcome.limits)

    def _read_some(self, seconds: float) -> bool:
        count = self._connection.receive_into(self._frames.space(), seconds)
        self._frames.received(count)
        return count > 0

    def _receive(self) -> tuple[Header, memoryview]:
        while (frame := self._frames.next()) is None:
            if not self._read_some(_STALL_SECONDS) and not self._frames.is_between_frames:
                raise TimeoutError("a frame was begun and not ended")
        return frame

    def _answer(self, header: Header, payload: memoryview) -> None:
        try:
            parts = self._parts(header, payload)
        except FrameError as error:
            if error.code in ENDING_CODES:
                raise
            parts = [pack_error(header.request_id, error.code, error.message)]
        self._send(parts)

    def _parts(self, header: Header, payload: memoryview) -> Sequence[Buffer]:
        number = header.request_id
        if header.kind == FrameType.COMPUTE:
            head = parse_compute_head(payload, self._welcome.limits)
            chain = self._chains.get(head.chain_id)
            if chain is None:
                raise FrameError(ErrorCode.UNKNOWN_CHAIN, f"Chain {head.chain_id} was not sent.")
            parts = self._service.compute(chain, payload, head)
            return [pack_header(FrameType.ROWS, number, sum(map(len, parts))), *parts]
        if header.kind == FrameType.PING:
            return [pack_header(FrameType.PONG, number, 0)]
        if header.kind == FrameType.CHAIN:
            chain_id, found = parse_chain(payload)
            if len(self._chains) >= _MAX_CHAINS and chain_id not in self._chains:
                raise FrameError(
                    ErrorCode.TOO_LARGE, f"A link may have {_MAX_CHAINS} chains, not more."
                )
            self._chains[chain_id] = KeyedChain.of(found.digest(), found)
            return [pack_header(FrameType.CHAIN_READY, number, 0)]
        raise FrameError(ErrorCode.BAD_PAYLOAD, f"A worker does not take {header.kind.name}.")

    def _send(self, parts: Sequence[Buffer]) -> None:
        self._connection.send_all(parts, _STALL_SECONDS)


def _refuse(link: socket.socket) -> None:
    text = f"This worker has {MAX_LINKS} links already."
    link.send(pack_error(0, ErrorCode.TOO_MANY_LINKS, text))
