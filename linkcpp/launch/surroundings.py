"""What a supervisor needs of this machine: engine, model file, discovery, and new plans."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from linkcpp.cluster.config import load_config
from linkcpp.cluster.findings import compare_engines
from linkcpp.cluster.identity import load_identity
from linkcpp.cluster.records import Cluster, NodeId, NodeRecord
from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.engine.check import choose_engine
from linkcpp.engine.records import Engine
from linkcpp.engine.rpc_server import LOOPBACK
from linkcpp.launch.experts.files import ExpertFiles
from linkcpp.launch.failing import NeverError, never_again
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.fronting import Fronting
from linkcpp.launch.llamaserver import LlamaServer
from linkcpp.launch.records import LaunchRequest
from linkcpp.launch.rendering import llama_server_command
from linkcpp.model.records import ModelInventory
from linkcpp.node.connector import NodeConnector
from linkcpp.node.discovery import DISCOVER_SECONDS, mdns_source
from linkcpp.node.hub_discovery import find_everywhere
from linkcpp.planning.documents import check_plan_model
from linkcpp.planning.offers import is_usable
from linkcpp.planning.records import Plan, PlanMode
from linkcpp.registry.hub_location import parse_hub_location
from linkcpp.registry.model_lookup import read_inventory_anywhere


class Surroundings:
    """This machine, as one deployment sees it."""

    def __init__(self, folder: DeploymentFolder, request: LaunchRequest) -> None:
        self.request = request
        self._folder = folder
        self._engine: Engine | None = None
        self._model_path = request.model_path
        self._hub_inventory: ModelInventory | None = None
        self._hub_files: ExpertFiles | None = None
        self.connector = NodeConnector()
        self.front = Fronting(folder, request)

    async def aclose(self) -> None:
        """End the front, and close the edges to nodes of hubs."""
        await self.front.aclose()
        await self.connector.aclose()

    async def check_model(self, plan: Plan) -> None:
        """Hold the model file against the plan.

        Raises:
            LinkcppError: it cannot be read, llama.cpp could not load it, or it is another model.
        """
        inventory = await self._inventory()
        with never_again():
            check_plan_model(plan, inventory)
        # Of a split model any part may be named, but llama-server wants the first.
        self._model_path = inventory.source

    async def _inventory(self) -> ModelInventory:
        if self._hub_inventory is not None:
            return self._hub_inventory
        location = self.request.model_path
        inventory = await asyncio.to_thread(read_inventory_anywhere, location)
        if parse_hub_location(location) is not None:
            # The hub may be away when the backbone has to be started again.
            self._hub_inventory = inventory
        return inventory

    async def expert_files(self) -> ExpertFiles:
        """Open the model as the source of backbone and slices; a hub is asked once.

        Raises:
            LinkcppError: the model cannot be read.
        """
        if self._hub_files is not None:
            return self._hub_files
        request = self.request
        files = await asyncio.to_thread(ExpertFiles, request.model_path, request.plan.model.source)
        if parse_hub_location(request.model_path) is not None:
            self._hub_files = files
        return files

    async def check_engine(self, plan: Plan) -> None:
        """Find a working engine that speaks what the plan was made for.

        Raises:
            LinkcppError: there is none, or this machine is not the plan's coordinator.
        """
        me = load_identity()
        if me.node_id != plan.coordinator_id:
            raise NeverError(
                f"The plan was made for the coordinator {plan.coordinator_name}, which this "
                "machine is not.",
                hint="Launch it there, or make another plan here with `linkcpp plan`.",
            )
        engine = await self.engine()
        if engine.fingerprint is None or plan.engine.rpc_version is None:
            return
        if difference := compare_engines(plan.engine, engine.fingerprint):
            raise NeverError(
                f"The engine of this machine is not the plan's: {difference}.",
                hint="Make another plan with `linkcpp plan`, or choose the plan's engine "
                "(`linkcpp engine list`).",
            )

    async def engine(self) -> Engine:
        """Return the engine of this machine, checked once."""
        if self._engine is None:
            self._engine = await asyncio.to_thread(choose_engine, load_config().engine)
        return self._engine

    async def discover_urls(self) -> list[str]:
        """Return the addresses of all nodes that can be seen from here now."""
        cluster = await self._cluster()
        return [url for node in cluster.nodes for url in node.urls]

    async def _cluster(self) -> Cluster:
        plan_urls = [url for urls in self.request.plan.node_urls.values() for url in urls]
        found = await find_everywhere(
            await self.engine(),
            hub_urls=(),
            urls=list(dict.fromkeys([*plan_urls, *self.request.node_urls])),
            use_mdns=self.request.use_mdns,
        )
        return found.cluster

    async def plan_without(self, excluded: frozenset[NodeId]) -> Plan:
        """Plan the same model with the same options over the plan's nodes that still answer.

        Raises:
            LinkcppError: it does not fit; says what would be needed.
        """
        cluster = await self._cluster()
        remaining = remaining_cluster(self.request.plan, cluster, excluded)
        inventory = await self._inventory()
        return await asyncio.to_thread(plan_again, inventory, remaining, self.request.plan)

    async def advertised_urls(self, node_id: NodeId) -> list[str]:
        """Return the addresses at which a node says on the local network that it is."""
        found: list[str] = []
        if self.request.use_mdns:
            with contextlib.suppress(TimeoutError, LinkcppError):
                async with (
                    asyncio.timeout(DISCOVER_SECONDS),
                    contextlib.aclosing(mdns_source()()) as candidates,
                ):
                    async for candidate in candidates:
                        found += [candidate.url] if candidate.node_id == node_id else []
        return found

    async def start_llama_server(
        self,
        placement: Sequence[str],
        on_line: Callable[[str], None],
        *,
        model_path: str | None = None,
    ) -> LlamaServer:
        """Render the command line and start llama-server with it, on loopback behind the front.

        ``placement`` follows from the plan. The model is the request's unless given.

        Raises:
            LinkcppError: the template or a port is unusable, or llama-server ended at once.
        """
        engine = await self.engine()
        request = self.request
        port = self.front.prepare()
        with never_again():
            command = llama_server_command(
                program=str(engine.location.llama_server),
                model_path=model_path or self._model_path,
                model_name=request.name,
                placement=placement,
                host=LOOPBACK,
                port=port,
                api_key_file=str(self.front.engine_key_file),
                own_templates=request.templates_folder,
            )
        write_atomically(self._folder.arguments_file, "\n".join(command) + "\n")
        return await LlamaServer.start(
            command,
            library_folders=engine.location.library_folders,
            log_path=self._folder.engine_log,
            on_line=on_line,
            port=port,
            shares_cores=request.plan.mode is PlanMode.EXPERTS,
        )


def plan_again(inventory: ModelInventory, cluster: Cluster, first: Plan) -> Plan:
    """Return the best plan after a failure of what was asked for at ``first``. Pure.

    A model that was spread over nodes because the user said so is served by fewer nodes than that,
    or by the coordinator alone, rather than not at all.

    Raises:
        LinkcppError: it does not fit in any mode; says what the wanted one would need.
    """
    # A supervisor lives for weeks and hardly ever plans: the solver takes 6 MB.
    from linkcpp.planning.shortfall import InfeasibleError, make_plan  # noqa: PLC0415

    options, counts = first.options, first.routing_counts
    try:
        return make_plan(inventory, cluster, options, counts)
    except InfeasibleError:
        if options.mode is not PlanMode.LAYERS:
            raise
        anything = options.model_copy(update={"mode": PlanMode.AUTO, "minimum_stages": 1})
        try:
            return make_plan(inventory, cluster, anything, counts)
        except InfeasibleError:
            pass
        raise


def remaining_cluster(plan: Plan, cluster: Cluster, excluded: Iterable[NodeId]) -> Cluster:
    """Return what a new plan may use after a failure. Pure.

    Only nodes of the first plan: a deployment does not spread to machines that it was not given.
    The coordinator offers no more than it did for the first plan, so that a limit that the user
    set there holds.
    """
    allowed = set(plan.node_urls) - set(excluded)
    nodes = tuple(
        node
        for node in cluster.nodes
        if is_usable(node.status, plan.mode)
        and node.record is not None
        and node.record.node_id in allowed
    )
    return Cluster(coordinator=_limited(cluster.coordinator, plan), nodes=nodes)


def _limited(coordinator: NodeRecord, plan: Plan) -> NodeRecord:
    limits = {
        stage.device: stage.memory.available_bytes
        for stage in plan.stages
        if stage.is_coordinator and not stage.is_cpu
    }
    cpu_limit = plan.coordinator_memory.available_bytes
    devices = tuple(
        device.model_copy(
            update={
                "offered_bytes": min(
                    device.offered_bytes,
                    cpu_limit if device.is_cpu else limits.get(device.name, device.offered_bytes),
                )
            }
        )
        for device in coordinator.devices
    )
    return coordinator.model_copy(update={"devices": devices})
