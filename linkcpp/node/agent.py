"""The node agent as a whole: API, rpc-servers and advertisement, from start to stop."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from linkcpp.cluster.identity import Identity
from linkcpp.cluster.mdns import Advertisement, Advertiser, memory_class
from linkcpp.cluster.measure import CPU, Promise, this_machine
from linkcpp.cluster.records import NodeRecord
from linkcpp.common.errors import LinkcppError
from linkcpp.common.http_server import BoundedServer, make_server, upgrading_protocol
from linkcpp.common.paths import data_folder, state_folder
from linkcpp.engine.check import choose_engine
from linkcpp.engine.fingerprint import read_devices
from linkcpp.engine.probe import EngineProblemFound
from linkcpp.engine.records import Engine, EngineLocation, EngineProblem
from linkcpp.engine.rpc_server import start_rpc_server
from linkcpp.link.acceptor import LinkAcceptor, LinkUser
from linkcpp.link.handshake import Machine, cluster_psk
from linkcpp.node.access import LINK_USER
from linkcpp.node.app import create_app
from linkcpp.node.joining import Joining
from linkcpp.node.limits import AGENT_BYTES, WORK_BYTES, promised
from linkcpp.node.managed_program import resident_bytes
from linkcpp.node.membership import Membership
from linkcpp.node.servers import ServerManager
from linkcpp.node.slice_store import SliceStore
from linkcpp.node.targets import Targets
from linkcpp.node.workers import WorkerManager
from linkcpp.registry.keys import load_keys
from linkcpp.registry.relay import DIRECT_PATH

_ADVERTISE_SECONDS = 30.0
_DEVICES_SECONDS = 15.0

_log = logging.getLogger(__name__)


class AgentOptions(NamedTuple):
    """What the owner of the machine decides.

    ``devices`` names the devices to offer, ``None`` all; ``host`` is what to listen on, ``None``
    all interfaces; ``slices_limit_bytes`` is the disk space for slices, ``None`` all but a reserve.
    """

    host: str | None = None
    memory_limit_bytes: int | None = None
    devices: tuple[str, ...] | None = None
    mdns: bool = True
    slices_limit_bytes: int | None = None


class NodeAgent:
    """One machine's agent; ``links`` are there while it serves."""

    links: LinkAcceptor

    def __init__(
        self,
        *,
        token: str,
        identity: Identity,
        engine: Engine,
        options: AgentOptions,
        overhead_bytes: int,
        core_count: int,
    ) -> None:
        self.token = token
        self.identity = identity
        self._engine = engine
        self._options = options
        self._devices_until = 0.0
        promising = asyncio.Lock()
        self.servers = ServerManager(
            engine,
            describe=self.describe,
            promising=promising,
            overhead_bytes=overhead_bytes,
            log_folder=state_folder() / "servers",
            max_threads=core_count,
        )
        self.slices = SliceStore(
            data_folder() / "slices",
            limit_bytes=options.slices_limit_bytes,
            log_folder=state_folder() / "slices",
        )
        self.workers = WorkerManager(
            engine,
            self.slices,
            name=identity.name,
            describe=self.describe,
            promising=promising,
            server_overhead_bytes=overhead_bytes,
            log_folder=state_folder() / "workers",
            max_threads=core_count,
        )

    async def describe(self) -> NodeRecord:
        """Tell what this machine has and offers now."""
        await self._refresh_devices()
        record = await asyncio.to_thread(
            this_machine,
            self._engine,
            identity=self.identity,
            memory_limit_bytes=self._options.memory_limit_bytes,
            promises=self._with_next_overhead(),
        )
        wanted = self._options.devices
        kept = tuple(device for device in record.devices if wanted is None or device.name in wanted)
        return record.model_copy(
            update={
                "devices": kept,
                "slice_bytes": self.slices.room_bytes(),
                "server_bytes": self.servers.overhead_bytes,
            }
        )

    async def _refresh_devices(self) -> None:
        """Ask the engine again what its graphics cards have free, while no server uses them.

        A check of an engine may be days old. Main memory is measured anew for every answer.
        """
        has_cards = any(device.name != CPU for device in self._engine.devices)
        is_fresh = monotonic() < self._devices_until
        if self._engine.problem is not None or not has_cards or is_fresh or self._promises():
            return
        self._devices_until = monotonic() + _DEVICES_SECONDS
        with contextlib.suppress(EngineProblemFound):
            devices = await asyncio.to_thread(read_devices, self._engine.location)
            self._engine = self._engine.model_copy(update={"devices": devices})

    def _promises(self) -> dict[str, Promise]:
        return promised((*self.servers.holdings(), *self.workers.holdings()))

    def _with_next_overhead(self) -> dict[str, Promise]:
        # Whoever takes the offer starts one more server, which costs this much besides; the agent
        # has its own part already.
        promises = self._promises()
        cpu = promises.get(CPU, Promise(0))
        promises[CPU] = Promise(
            cpu.memory_bytes + AGENT_BYTES + self.servers.overhead_bytes,
            cpu.allocated_bytes + AGENT_BYTES,
        )
        return promises

    async def serve(
        self,
        sockets: list[socket.socket],
        stop: asyncio.Event,
        on_ready: Callable[[NodeRecord], None],
        joining: Joining | None = None,
    ) -> None:
        """Run until ``stop``, then end every server, say goodbye and close the sockets.

        Raises:
            RevokedError: the hub that this node joined turned it out.
        """
        server = self._begin_to_serve()
        async with contextlib.aclosing(self.links), self._place_in_hub(joining) as membership:
            # A fetch from the hub that was interrupted goes on.
            self.slices.load()
            serving = asyncio.create_task(server.serve(sockets=sockets))
            stopping = asyncio.create_task(stop.wait())
            advertising = asyncio.create_task(self._advertise(sockets[0].getsockname()[1]))
            staying = asyncio.create_task(membership.run() if membership else stop.wait())
            try:
                on_ready(await self.describe())
                ends = {serving, stopping, staying}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (advertising, stopping, staying):
                    task.cancel()
                await asyncio.gather(self.workers.aclose(), self.servers.aclose())
                await self.slices.aclose()
                server.should_exit = True
                await asyncio.gather(advertising, stopping, staying, return_exceptions=True)
                await serving
            if not staying.cancelled():
                staying.result()

    def _begin_to_serve(self) -> BoundedServer:
        """Take links; the API answers on them as it does to programs on this machine."""

        def make_api(user: LinkUser) -> asyncio.Protocol:
            return server.new_protocol({LINK_USER: user})

        targets = Targets(self.servers, self.workers, make_api)
        self.links = LinkAcceptor(
            own_key=load_keys().edge,
            own=Machine(self.identity.node_id, self.identity.name),
            serve=targets.serve,
            psk=cluster_psk(self.token),
        )
        server = make_server(
            create_app(self),
            http=upgrading_protocol(
                lambda path: (
                    self.links.take if path == DIRECT_PATH else self.workers.take_link(path)
                )
            ),
            # The application has no WebSocket: this bounds what it refuses.
            max_message_bytes=1024,
        )
        return server

    @contextlib.asynccontextmanager
    async def _place_in_hub(self, joining: Joining | None) -> AsyncIterator[Membership | None]:
        if joining is None:
            yield None
            return
        async with joining.membership(self) as membership:
            yield membership

    async def _advertise(self, port: int) -> None:
        if not self._options.mdns:
            return
        try:
            bind_host = self._options.host or "::"
            async with Advertiser(await self._advertisement(port), bind_host=bind_host) as it:
                while True:
                    await asyncio.sleep(_ADVERTISE_SECONDS)
                    with contextlib.suppress(LinkcppError):  # the network may come back
                        await it.update(await self._advertisement(port))
        except LinkcppError as error:
            _log.warning("not advertised by mDNS: %s", error)

    async def _advertisement(self, port: int) -> Advertisement:
        record = await self.describe()
        return Advertisement(
            node_id=self.identity.node_id,
            name=self.identity.name,
            port=port,
            engine_digest=record.engine.digest if record.engine else None,
            memory_class=memory_class(sum(device.offered_bytes for device in record.devices)),
        )


def engine_or_problem(explicit: Path | None) -> Engine:
    """Choose the engine; where none works, return one that only tells the problem.

    A node without a working engine runs all the same, so that ``linkcpp discover`` can say from
    afar what is wrong with it.
    """
    try:
        return choose_engine(explicit)
    except LinkcppError as error:
        return Engine(
            location=EngineLocation(llama_server=None, rpc_server=None, found_by="nothing"),
            fingerprint=None,
            problem=EngineProblem(
                code="no_engine",
                message=error.message,
                hint=error.hint or "`linkcpp engine install` brings one that works.",
            ),
        )


async def measure_overhead(engine: Engine) -> int:
    """Start an rpc-server, see what it takes while idle, and add what it takes while it works.

    Returns 0 where the engine does not work: then no server is ever started.
    """
    if engine.problem is not None:
        return 0
    running = await start_rpc_server(
        engine.location,
        device=CPU,
        threads=1,
        log_path=state_folder() / "servers" / "measure.log",
    )
    try:
        return resident_bytes(running.process) + WORK_BYTES
    finally:
        await running.process.stop()
