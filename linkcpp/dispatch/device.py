"""The virtual device: a ggml-RPC server for llama-server, with the experts elsewhere.

One thread a client; requests of all clients are done one read at a time, under one lock, since
they share the backing server. What llama-server sends is not answered one by one: SETs wait until
something needs them, and leave together with it in one write.
"""

import logging
import socket
from collections.abc import Callable

import numpy as np

from linkcpp.common.errors import LinkcppError
from linkcpp.common.threaded_server import ThreadedServer
from linkcpp.dispatch.memory import RequestError
from linkcpp.dispatch.session import Session
from linkcpp.dispatch.shared_device import SharedDevice
from linkcpp.dispatch.swarm import Swarm
from linkcpp.engine.ops import OpTable
from linkcpp.engine.rpc_socket import RpcSocket

_log = logging.getLogger(__name__)

MAX_CLIENTS = 64


class VirtualDevice:
    """Serves llama-server. ``on_failure`` is called once if the backing server is lost."""

    def __init__(
        self,
        backing: RpcSocket,
        ops: OpTable,
        swarm: Swarm,
        on_failure: Callable[[LinkcppError], None],
    ) -> None:
        self._on_failure = on_failure
        self._shared = SharedDevice(backing, ops, swarm, self._give_up)
        self.counters = self._shared.counters
        self._clients = ThreadedServer(self._serve_client, MAX_CLIENTS)

    @property
    def client_count(self) -> int:
        """How many clients there were so far."""
        return self._clients.accepted_count

    def serve(self, listener: socket.socket) -> None:
        """Accept clients until ``stop``."""
        self._clients.serve(listener)

    def stop(self) -> None:
        """End every client and the service; may be called from any thread and more than once."""
        self._clients.stop()

    def _give_up(self, error: LinkcppError) -> None:
        self._on_failure(error)
        self.stop()

    def _serve_client(self, client: socket.socket) -> None:
        session = Session(self._shared, client, self._clients.let_in)
        try:
            # What overflows or is not a number is told to the client as the engine would tell it.
            with np.errstate(all="ignore"):
                session.run()
        except RequestError as error:
            _log.warning("a client was refused: %s", error)
        except LinkcppError as error:
            _log.error("a client cannot be served: %s", error)
        finally:
            session.close()
