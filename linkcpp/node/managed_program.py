"""Programs that an agent runs for others: each with a lease, streams to it, and an end."""

import asyncio
import contextlib
import logging
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Generic, NamedTuple, Protocol, TypeVar

import psutil

from linkcpp.cluster.measure import CPU
from linkcpp.common.text import printable
from linkcpp.engine.process import SupervisedProcess, tail_log
from linkcpp.link.acceptor import LinkUser
from linkcpp.node.limits import RefusedError
from linkcpp.node.records import ServerState

# Ended programs stay listed, so that a coordinator can still read why: this many.
_REMEMBERED = 32
_TICK_SECONDS = 0.25

_log = logging.getLogger(__name__)


class Holding(NamedTuple):
    """What one program was promised on a device, what it costs besides, and what it has now."""

    device: str
    memory_bytes: int
    overhead_bytes: int
    resident_bytes: int


class UsingStream(Protocol):
    """A stream that uses a program."""

    @property
    def user(self) -> LinkUser:
        """Whose it is."""
        ...

    @property
    def is_owed(self) -> bool:
        """Whether its client waits for an answer of an rpc-server."""
        ...

    def end(self, reason: str) -> None:
        """End, because the program did."""
        ...


class ManagedProgram:
    """One program, from the request to its end. ``what`` names its kind for people."""

    def __init__(
        self,
        what: str,
        *,
        deployment: str,
        device: str,
        memory_bytes: int,
        overhead_bytes: int,
        lease_seconds: float,
        log_folder: Path,
    ) -> None:
        self.key = uuid.uuid4().hex
        self.what = what
        self.deployment = deployment
        self.device = device
        self.memory_bytes = memory_bytes
        self.overhead_bytes = overhead_bytes
        self.log_path = log_folder / f"{self.key}.log"
        self.state = ServerState.STARTING
        self.detail: str | None = None
        self.process: SupervisedProcess | None = None
        self.descendants: tuple[psutil.Process, ...] = ()
        self.port = 0
        self.streams: set[UsingStream] = set()
        self._lease_seconds = lease_seconds
        self.lease_ends = 0.0
        self.renew()

    @property
    def label(self) -> str:
        """What people call it."""
        return f"the {self.what} of {printable(self.deployment)}"

    @property
    def is_alive(self) -> bool:
        """Whether it holds memory, or may soon."""
        return self.state in (ServerState.STARTING, ServerState.READY)

    @property
    def holding(self) -> Holding:
        """The memory that it was promised and has."""
        return Holding(self.device, self.memory_bytes, self.overhead_bytes, self.resident_bytes)

    @property
    def resident_bytes(self) -> int:
        """The main memory that its processes have now."""
        return resident_bytes(self.process, self.descendants) if self.process else 0

    def log_paths(self) -> tuple[Path, ...]:
        """The files that tell what it printed."""
        return (self.log_path,)

    def renew(self) -> None:
        """Start the lease again."""
        self.lease_ends = monotonic() + self._lease_seconds

    async def owes_nothing(self) -> bool:
        """Whether no client waits for an answer; known without asking the program."""
        return not any(stream.is_owed for stream in self.streams)

    @property
    def stream_count(self) -> int:
        """How many streams use it."""
        return len(self.streams)

    def end(self, state: ServerState, detail: str) -> None:
        """Note the end, the first reason given stays, and end the streams with it."""
        if not self.is_alive:
            return
        self.state = state
        self.detail = detail
        for stream in list(self.streams):
            stream.end(f"the {self.what} ended: {detail}")


M = TypeVar("M", bound=ManagedProgram)


class ProgramManager(Generic[M]):
    """Keeps programs of one kind, and ends them when nobody wants them any more.

    ``max_streams`` is how many streams one program serves at a time; with ``None`` any number, but
    of one link only.
    """

    def __init__(self, what: str, code: str, *, max_streams: int | None) -> None:
        self._what = what
        self._code = code
        self._max_streams = max_streams
        self._items: dict[str, M] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._is_closing = False

    def holdings(self) -> Iterator[Holding]:
        """Tell what running programs may take and what they hold."""
        return (item.holding for item in self._items.values() if item.is_alive)

    def deployments(self) -> Iterator[str]:
        """Name whom running programs serve."""
        return (item.deployment for item in self._items.values() if item.is_alive)

    def get(self, key: str) -> M:
        """Find a program.

        Raises:
            RefusedError: there is none with this id (any more).
        """
        item = self._items.get(key)
        if item is None:
            raise RefusedError(
                404,
                f"unknown_{self._code}",
                f"This node has no such {self._what}.",
                hint="It ended, or the agent was started again since.",
            )
        return item

    def logs(self, key: str, tail: int) -> str:
        """Read the last lines that a program printed."""
        lines: list[str] = []
        for path in self.get(key).log_paths():
            lines += tail_log(path, tail)
        return "".join(f"{line}\n" for line in lines[-tail:])

    def claim(self, key: str, stream: UsingStream) -> M:
        """Take a program for a stream; ``release`` gives it back.

        Raises:
            RefusedError: it is used enough already, or is not ready.
        """
        item = self.get(key)
        if item.state is not ServerState.READY:
            why = f": {item.detail}" if item.detail else ""
            raise RefusedError(
                409, f"{self._code}_{item.state}", f"The {self._what} is {item.state}{why}."
            )
        links = {used.user.link_id for used in item.streams}
        is_taken = self._max_streams is None and links and stream.user.link_id not in links
        if is_taken or item.stream_count == self._max_streams:
            raise RefusedError(
                409,
                "in_use",
                f"This {self._what} is in use by as many as it serves at a time.",
                hint="Close one of them first, or ask for another.",
            )
        if stream.user.link_id not in links:
            _log.info("%s uses %s", printable(stream.user.machine.name, 64), item.label)
        item.streams.add(stream)
        return item

    def release(self, key: str, stream: UsingStream) -> None:
        """Give a program back when a stream has ended; the lease starts again."""
        item = self._items.get(key)
        if item is not None:
            item.streams.discard(stream)
            item.renew()

    async def delete(self, key: str, peer: str) -> None:
        """End a program and return when its memory is free; fine when it is gone."""
        item = self._items.get(key)
        if item is None:
            return
        if item.is_alive:
            _log.info("%s stops %s", peer, item.label)
        await self._end(item, "it was stopped by its owner")
        self._items.pop(key, None)

    async def aclose(self) -> None:
        """End all programs and take no more."""
        self._is_closing = True
        items = list(self._items.values())
        await asyncio.gather(*(self._end(item, "the node agent was stopped") for item in items))
        await asyncio.gather(*self._watches)

    def _check_open(self) -> None:
        if self._is_closing:
            raise RefusedError(409, "stopping", "This node agent is being stopped.")

    def _add(self, item: M) -> None:
        self._items[item.key] = item
        ended = [other for other in self._items.values() if not other.is_alive]
        for old in ended[: max(0, len(ended) - _REMEMBERED)]:
            del self._items[old.key]
            for path in old.log_paths():
                path.unlink(missing_ok=True)

    def _become_ready(self, item: M, process: SupervisedProcess) -> None:
        item.state = ServerState.READY
        item.renew()
        watch = asyncio.create_task(self._watch(item, process))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _end(self, item: M, reason: str) -> None:
        item.end(ServerState.STOPPED, reason)
        if item.process is not None:
            await item.process.stop()

    async def _watch(self, item: M, process: SupervisedProcess) -> None:
        """See a ready program to its end: by itself, by its lease, or by ``delete``."""
        exited = asyncio.create_task(process.wait())
        while not exited.done():
            await asyncio.wait({exited}, timeout=_TICK_SECONDS)
            is_idle = item.is_alive and not item.streams
            if is_idle and monotonic() > item.lease_ends:
                _log.warning("nobody renewed the lease of %s: it ends", item.label)
                await self._end(item, "its lease ended")
        if item.is_alive:
            reason = exited.result().detail or "it ended"
            _log.error("%s ended: %s", item.label, reason)
            item.end(ServerState.FAILED, reason)


def cap_memory(pid: int | None, device: str, max_bytes_besides: int) -> None:
    """Have the system itself hold a server in RAM to its promise, where it can (Linux).

    Whoever asks for memory is refused beyond the promise; this holds also for what a graph makes
    the server allocate for itself. ``max_bytes_besides`` is what it may add to what it has.
    """
    if device != CPU or not sys.platform.startswith("linux") or pid is None:
        return
    with contextlib.suppress(psutil.Error, OSError):
        program = psutil.Process(pid)
        most = program.memory_info().data + max_bytes_besides
        program.rlimit(psutil.RLIMIT_DATA, (most, most))


def resident_bytes(process: SupervisedProcess, descendants: Iterable[psutil.Process] = ()) -> int:
    """Return the memory that a program, its keeper and what it started hold; 0 once it is gone."""
    if process.pid is None:
        return 0
    try:
        program = psutil.Process(process.pid)
        keeper = psutil.Process(program.ppid())
        total = program.memory_info().rss + keeper.memory_info().rss
    except psutil.Error:
        return 0
    for descendant in descendants:
        with contextlib.suppress(psutil.Error):
            total += descendant.memory_info().rss
    return total
