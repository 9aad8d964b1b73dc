"""The virtual device: a ggml-RPC server for llama-server, with the experts elsewhere.

One thread a client; requests of all clients are done one read at a time, under one lock, since
they share the backing server. What llama-server sends is not answered one by one: SETs wait until
something needs them, and leave together with it in one write.
"""

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from linkcpp.common.errors import LinkcppError
from linkcpp.common.threaded import ThreadedServer
from linkcpp.dispatch.memory import RequestError
from linkcpp.dispatch.session import Session
from linkcpp.dispatch.swarm import Swarm
from linkcpp.engine import wire_messages as messages
from linkcpp.engine.ops import OpTable
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.engine.wire import Command

_log = logging.getLogger(__name__)

MOST_CLIENTS = 64


@dataclass(slots=True)
class DeviceCounters:
    """What happened since the start; seconds are within graphs that have experts.

    ``early_count`` results were answered before the backing server had them; those of
    ``differing_sum_count`` were not equal when they were compared.
    """

    graph_count: int = 0
    compiled_count: int = 0
    dropped_bytes: int = 0
    early_count: int = 0
    differing_sum_count: int = 0
    read_seconds: float = 0.0
    swarm_seconds: float = 0.0


class VirtualDevice:
    """Serves llama-server. ``on_failure`` is called once if the backing server is lost."""

    def __init__(
        self,
        backing: RpcSocket,
        ops: OpTable,
        swarm: Swarm,
        on_failure: Callable[[LinkcppError], None],
    ) -> None:
        self.backing = backing
        self.ops = ops
        self.swarm = swarm
        self.counters = DeviceCounters()
        self.lock = threading.Lock()
        self.failure: LinkcppError | None = None
        self._on_failure = on_failure
        zero = messages.DEVICE_INDEX.build(messages.DeviceIndex(0))
        self.fixed_answers: dict[Command, bytes] = {
            Command.HELLO: messages.build_hello_answer(backing.version),
            Command.DEVICE_COUNT: messages.DEVICE_COUNT_ANSWER.build(messages.Number(1)),
            Command.GET_ALIGNMENT: bytes(backing.call(Command.GET_ALIGNMENT, zero)),
            Command.GET_MAX_SIZE: bytes(backing.call(Command.GET_MAX_SIZE, zero)),
        }
        self._clients = ThreadedServer(self._serve_client, MOST_CLIENTS)

    @property
    def client_count(self) -> int:
        """How many clients there were so far."""
        return self._clients.accepted_count

    def serve(self, listener: socket.socket) -> None:
        """Accept clients until ``stop``."""
        self._clients.serve(listener)

    def let_in(self, client: socket.socket) -> None:
        """Keep a client that speaks the protocol; others make room for new ones."""
        self._clients.let_in(client)

    def stop(self) -> None:
        """End every client and the service; may be called from any thread and more than once."""
        self._clients.stop()

    def fail(self, error: LinkcppError) -> None:
        """Give up: without the backing server nothing can be computed."""
        if self.failure is None:
            self.failure = error
            _log.error("the backing server is lost: %s", error)
            self._on_failure(error)
        self.stop()

    def _serve_client(self, client: socket.socket) -> None:
        session = Session(self, client)
        try:
            # What overflows or is no number is told to the client as the engine would tell it.
            with np.errstate(all="ignore"):
                session.run()
        except RequestError as error:
            _log.warning("a client was refused: %s", error)
        except LinkcppError as error:
            _log.error("a client cannot be served: %s", error)
        finally:
            session.close()
