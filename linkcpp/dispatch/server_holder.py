"""An rpc-server of this machine as a holder: loaded and driven from here, without a worker.

What a worker on the same machine would cost is saved: a process, and two hand-overs a layer. One
request at a time is on the connection, since commands are answered in turn; others wait here.
"""

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import format_bytes
from linkcpp.dispatch.holder import Answer, Holder, check_model
from linkcpp.engine.ops import read_op_table
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_server import LOOPBACK
from linkcpp.engine.rpc_socket import RpcSocket, limit_receiving, unsent
from linkcpp.engine.wire import ANSWER_SIZE, WireError
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.chain import Chain, KeyedChain
from linkcpp.worker.compute import ExpertCompute, Steps
from linkcpp.worker.frames import (
    Buffer,
    ErrorCode,
    FrameError,
    Limits,
    Pairs,
    TokenPairs,
    Welcome,
)
from linkcpp.worker.slabs import GgufSlabs
from linkcpp.worker.store import LoadedSlabs

_MAX_BUFFERS = 64
# A server that was late is asked again once it has done what it was asked.
_CATCH_UP_SECONDS = 5.0


class ServerAddress(NamedTuple):
    """An rpc-server of this machine, and the experts that it is to hold.

    ``slabs`` is the path or URL of a GGUF file that has them; ``engine`` is the server's build.
    """

    name: str
    port: int
    engine: EngineLocation
    slabs: str
    segments: tuple[Segment, ...]

    def holder(self, number: int) -> Holder:
        """Make the holder with this number."""
        return ServerHolder(number, self)


@dataclass(slots=True)
class _Loaded:
    """A connection whose server has the slabs."""

    rpc: RpcSocket
    compute: ExpertCompute
    welcome: Welcome


@dataclass(slots=True)
class _Request:
    """A request on the connection: what is left to send, and what came of the answer."""

    number: int
    steps: Steps
    outgoing: Sequence[Buffer] = ()
    answer: memoryview = field(default_factory=lambda: memoryview(b""))
    have_bytes: int = 0
    began: float = 0.0
    makes_room: bool = False
    is_wanted: bool = True


class ServerHolder(Holder):
    """Holds slabs in an rpc-server of its own.

    Where it is late its connection stays, with the slabs; ``open`` waits for what it owes.
    """

    def __init__(self, number: int, address: ServerAddress) -> None:
        super().__init__(number, address.name)
        self._address = address
        self._loaded: _Loaded | None = None
        self._is_broken = False
        self._request: _Request | None = None
        self._waiting: deque[tuple[int, Steps]] = deque()
        self._answers: deque[Answer] = deque()
        self._wait_ms = 0.0

    @property
    def is_sending(self) -> bool:
        """Whether bytes wait until the socket takes them."""
        return self._request is not None and bool(self._request.outgoing)

    def teach(self, chain_id: int, chain: Chain) -> None:
        """Nothing to do: requests bring their chains."""

    def ask(self, number: int, chain: KeyedChain, pairs: Pairs) -> None:
        """See ``Holder.ask``."""
        self._ask(number, self._compute().steps(chain, pairs))

    def ask_token(self, number: int, chain: KeyedChain, token: TokenPairs) -> None:
        """See ``Holder.ask_token``."""
        self._ask(number, self._compute().token_steps(chain, token))

    def forget(self, number: int) -> None:
        """Nothing to do: who asked knows what he asked for."""

    def _compute(self) -> ExpertCompute:
        if self._loaded is None or self.link is None:
            raise ConnectionError("the link is closed")
        return self._loaded.compute

    def _ask(self, number: int, steps: Steps) -> None:
        if self._request is None:
            self._begin(number, steps)
        else:
            self._waiting.append((number, steps))

    def _begin(self, number: int, steps: Steps) -> None:
        self._request = request = _Request(number, steps)
        self._advance(request, None)

    def _advance(self, request: _Request, answer: Buffer | None) -> None:
        """Go on with the next step, or with the next request where all are done."""
        try:
            step = next(request.steps) if answer is None else request.steps.send(answer)
        except StopIteration as done:
            took_us = round((time.perf_counter() - request.began) * 1e6)
            self._answers.append(Answer(request.number, done.value, took_us))
            self._request = None
            if self._waiting:
                self._begin(*self._waiting.popleft())
            return
        except FrameError:
            # Nothing of it is under way.
            self._request = None
            raise
        request.outgoing, request.makes_room = step.parts, step.makes_room
        request.answer = np.empty(ANSWER_SIZE.size + step.answer_bytes, np.uint8).data
        request.have_bytes = 0
        request.began = request.began or time.perf_counter()
        self.resume()

    def resume(self) -> None:
        """Send what waits; see ``Holder.resume``."""
        request = self._request
        if request is None:
            return
        if self._loaded is None:
            raise ConnectionError("the link is closed")
        connection = self._loaded.rpc.connection
        try:
            while request.outgoing:
                sent = connection.sendmsg(request.outgoing[:_MAX_BUFFERS], (), socket.MSG_DONTWAIT)
                self.sent_bytes += sent
                request.outgoing = unsent(request.outgoing, sent)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._broken(error.strerror or str(error)) from error

    def receive(self, within_ms: float = 0.0) -> bool:
        """Read what is there, or the whole answer; see ``Holder.receive``."""
        if self._loaded is None or self.link is None:
            raise ConnectionError("the link is closed")
        return bool(self._answers) or self._receive(self._loaded.rpc.connection, within_ms)

    def _receive(self, connection: socket.socket, within_ms: float) -> bool:
        request = self._request
        if request is None:
            return False
        if within_ms and within_ms != self._wait_ms:
            limit_receiving(connection, within_ms / 1000)
            self._wait_ms = within_ms
        # The server sends size and data apart: one call waits for both.
        flags = socket.MSG_WAITALL if within_ms else socket.MSG_DONTWAIT
        try:
            count = connection.recv_into(request.answer[request.have_bytes :], 0, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._broken(error.strerror or str(error)) from error
        if not count:
            raise self._broken("it closed the connection")
        self.received_bytes += count
        request.have_bytes += count
        if request.have_bytes == len(request.answer):
            self._take(request)
        return True

    def _take(self, request: _Request) -> None:
        (announced,) = ANSWER_SIZE.unpack_from(request.answer)
        wanted = len(request.answer) - ANSWER_SIZE.size
        if announced != wanted:
            raise self._broken(f"it answered {announced} bytes instead of {wanted}")
        if request.is_wanted or request.makes_room:
            self._advance(request, request.answer[ANSWER_SIZE.size :])
        else:
            self._request = None

    def next_answer(self) -> Answer | None:
        """Return the rows of a request that is done; see ``Holder.next_answer``."""
        return self._answers.popleft() if self._answers else None

    def open(self, chains: Sequence[tuple[int, Chain]], model_digest: str | None) -> None:
        """Load the slabs, or wait for what is owed; see ``Holder.open``."""
        loaded = self._loaded
        if loaded is None:
            loaded = self._loaded = self._load(model_digest)
        else:
            try:
                self._catch_up(loaded.rpc.connection)
            except OSError:
                self.close()
                raise
        self._wait_ms = 0.0
        self.welcome, self.link = loaded.welcome, loaded.rpc.connection

    def _load(self, model_digest: str | None) -> _Loaded:
        address = self._address
        self.loaded_bytes = 0

        def tell(more_bytes: int) -> None:
            self.loaded_bytes += more_bytes
            self.detail = f"{format_bytes(self.loaded_bytes)} of its experts are loaded"

        with contextlib.ExitStack() as opened:
            try:
                rpc = RpcSocket(LOOPBACK, address.port)
                opened.callback(rpc.close)
                with contextlib.closing(GgufSlabs(address.slabs, address.segments)) as slabs:
                    welcome = Welcome(
                        model_digest=slabs.model_digest,
                        hidden_size=slabs.hidden_size,
                        segments=slabs.segments,
                        engine=f"RPC {rpc.version}",
                        limits=Limits(),
                        name=address.name,
                    )
                    check_model(welcome, model_digest)
                    store = LoadedSlabs(rpc, slabs, tell)
            except WireError as error:
                raise ConnectionError(error.message) from error
            except FrameError:
                raise
            except LinkcppError as error:
                raise FrameError(ErrorCode.ENGINE_FAILED, error.message) from error
            ops = read_op_table(address.engine, rpc.version)
            opened.pop_all()
        return _Loaded(rpc, ExpertCompute(rpc, ops, store), welcome)

    def _catch_up(self, connection: socket.socket) -> None:
        """Wait for the answer of the step that was sent; nobody wants it any more."""
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        poll = select.poll()
        while self._request is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it still works on what it was asked before")
            poll.register(connection, select.POLLIN | (select.POLLOUT if self.is_sending else 0))
            poll.poll(1000 * left + 1)
            self.resume()
            self._receive(connection, 0.0)

    def close(self) -> None:
        """Forget what was asked; see ``Holder.close``."""
        self.link = None
        self._waiting.clear()
        self._answers.clear()
        if self._request is not None:
            self._request.is_wanted = False
        if self._is_broken:
            self.end()

    def end(self) -> None:
        """End the connection; the server gives the memory back."""
        self.link, self._request = None, None
        self._waiting.clear()
        self._answers.clear()
        loaded, self._loaded, self._is_broken = self._loaded, None, False
        if loaded is not None:
            loaded.rpc.close()

    def _broken(self, why: str) -> ConnectionError:
        self._is_broken = True
        return ConnectionError(why)
