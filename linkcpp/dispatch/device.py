"""The virtual device: a ggml-RPC server for llama-server, with the experts elsewhere.

One thread a client; requests of all clients are done one read at a time, under one lock, since
they share the backing server. What llama-server sends is not answered one by one: SETs wait until
something needs them, and leave together with it in one write.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from linkcpp.common.errors import LinkcppError
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

    client_count: int = 0
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
        self._clients: set[socket.socket] = set()
        self._clients_lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._is_stopping = False

    def serve(self, listener: socket.socket) -> None:
        """Accept clients until ``stop``."""
        self._listener = listener
        while not self._is_stopping:
            try:
                client, _ = listener.accept()
            except OSError:
                if self._is_stopping:
                    break
                time.sleep(0.05)
                continue
            with self._clients_lock:
                is_full = len(self._clients) >= MOST_CLIENTS
                if not is_full:
                    self._clients.add(client)
            if is_full:
                client.close()
                continue
            self.counters.client_count += 1
            threading.Thread(target=self._run_client, args=(client,), daemon=True).start()

    def stop(self) -> None:
        """End every client and the service; may be called from any thread and more than once."""
        self._is_stopping = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with self._clients_lock:
            clients = list(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def fail(self, error: LinkcppError) -> None:
        """Give up: without the backing server nothing can be computed."""
        if self.failure is None:
            self.failure = error
            _log.error("the backing server is lost: %s", error)
            self._on_failure(error)
        self.stop()

    def _run_client(self, client: socket.socket) -> None:
        session = Session(self, client)
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            session.run()
        except (OSError, EOFError):
            pass
        except RequestError as error:
            _log.warning("a client was refused: %s", error)
        except LinkcppError as error:
            _log.error("a client cannot be served: %s", error)
        except Exception:
            _log.exception("a client ended by a defect")
        finally:
            session.close()
            with self._clients_lock:
                self._clients.discard(client)
            client.close()
