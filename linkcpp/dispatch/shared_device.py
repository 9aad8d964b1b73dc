"""What all clients of the virtual device share: the backing server, the swarm, and one lock."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from linkcpp.common.errors import LinkcppError
from linkcpp.dispatch.swarm import Swarm
from linkcpp.engine import wire_messages as messages
from linkcpp.engine.ops import OpTable
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.engine.wire import Command

_log = logging.getLogger(__name__)


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


class SharedDevice:
    """The device as a client's session sees it; ``lock`` is held while requests are handled."""

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

    def fail(self, error: LinkcppError) -> None:
        """Give up: without the backing server nothing can be computed."""
        if self.failure is None:
            self.failure = error
            _log.error("the backing server is lost: %s", error)
            self._on_failure(error)
