"""What a node takes on and what it refuses: pure decisions about promised memory."""

from collections.abc import Iterable

from linkcpp.cluster.measure import CPU, Promise
from linkcpp.cluster.records import NodeDevice, NodeRecord
from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import ErrorBody
from linkcpp.common.text import printable
from linkcpp.common.units import format_bytes
from linkcpp.node.records import WORKER_SCRATCH_BYTES

# What an rpc-server may need besides its idle self and the buffers that it was promised: the work
# space of a mat-mul, the graph, one piece of a tensor on its way in and one out.
WORK_BYTES = 64 * 2**20
# The agent itself: 72 MB, 92 MB with what it shares with other programs of linkcpp.
AGENT_BYTES = 96 * 2**20

_STACK_BYTES = 8 * 2**20
_PARTLY_WRITABLE = frozenset({"CPU", "CUDA", "ROCm", "Vulkan", "MTL"})


class RefusedError(LinkcppError):
    """A refused call: HTTP ``status`` and the stable ``code`` of its ``ErrorBody``."""

    def __init__(self, status: int, code: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code

    def body(self) -> ErrorBody:
        """Give what goes over the wire."""
        return ErrorBody(code=self.code, message=self.message, hint=self.hint)


def takes_pieces(device: str) -> bool:
    """Tell whether a tensor on the device may be written a part at a time.

    Backends that re-arrange a tensor when it is set need the whole of it; of a server on one of
    those, the machine's memory holds one tensor more while it loads.
    """
    return device.rstrip("0123456789") in _PARTLY_WRITABLE


def max_data_bytes(memory_bytes: int, threads: int) -> int:
    """Return what the system may give to a server in RAM besides what it has, at the very most.

    ``memory_bytes`` are the buffers that it may still allocate. Stacks of threads are reserved at
    their full size and hardly used.
    """
    return memory_bytes + WORK_BYTES + threads * _STACK_BYTES


def promised(servers: Iterable[tuple[str, int, int, int]]) -> dict[str, Promise]:
    """Sum up promises by device, from (device, promised, overhead, resident) bytes of each server.

    What a server takes besides its buffers comes out of the system's memory whatever its device.
    """
    totals: dict[str, Promise] = {}

    def add(device: str, memory_bytes: int, allocated_bytes: int) -> None:
        before = totals.get(device, Promise(0))
        totals[device] = Promise(
            before.memory_bytes + memory_bytes, before.allocated_bytes + allocated_bytes
        )

    for device, memory_bytes, overhead_bytes, resident_bytes in servers:
        if device == CPU:
            whole = memory_bytes + overhead_bytes
            add(CPU, whole, min(resident_bytes, whole))
        else:
            add(device, memory_bytes, 0)
            add(CPU, overhead_bytes, min(resident_bytes, overhead_bytes))
    return totals


def check_request(
    device_name: str, memory_bytes: int, node: NodeRecord, *, served: Iterable[str] = ()
) -> NodeDevice:
    """Decide whether a node can give memory of a device.

    ``served`` are the deployments that have memory of it already.

    Raises:
        RefusedError: no engine that works, no such device, or more memory than the device offers.
    """
    if node.engine_problem is not None:
        problem = node.engine_problem
        raise RefusedError(409, "engine_problem", problem.message, hint=problem.hint)
    device = next((device for device in node.devices if device.name == device_name), None)
    if device is None:
        names = ", ".join(device.name for device in node.devices)
        raise RefusedError(
            422,
            "unknown_device",
            f"This node offers no device {device_name[:64]!r}.",
            hint=f"It offers: {names}.",
        )
    if memory_bytes > device.offered_bytes:
        free, needed = format_bytes(device.offered_bytes), format_bytes(memory_bytes)
        if free == needed:
            free, needed = f"{device.offered_bytes} bytes", f"{memory_bytes}"
        names = ", ".join(repr(printable(name)) for name in dict.fromkeys(served))
        raise RefusedError(
            409,
            "insufficient_memory",
            f"{node.name} has {free} free on {device.name} and this needs {needed}"
            f"{f'; it already serves {names}' if names else ''}.",
            hint="Stop another deployment there, raise the owner's limit (`linkcpp node "
            "--memory`), or plan again.",
        )
    return device


def worker_memory_bytes(asked_bytes: int | None, slab_bytes: int) -> int:
    """Return what a worker is promised on its device: its slabs, and room to work.

    Raises:
        RefusedError: less was asked for than it needs.
    """
    least = slab_bytes + WORKER_SCRATCH_BYTES
    if asked_bytes is not None and asked_bytes < least:
        raise RefusedError(
            422,
            "too_little_memory",
            f"A worker with these slices needs at least {format_bytes(least)} ({least} bytes), "
            f"not {format_bytes(asked_bytes)}.",
            hint="Ask for that much, or for none: then it is promised just what it needs.",
        )
    return asked_bytes or least
