"""The nodes of a plan, found again: by the addresses of the plan, else by discovery."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from linkcpp.cluster.findings import compare_engines
from linkcpp.cluster.records import NodeId, NodeRecord
from linkcpp.launch.decisions import remote_nodes
from linkcpp.launch.failing import NodeMissingError, StepRefusedError
from linkcpp.node.client import NodeClient, NodeError, OtherNodeError, WrongTokenError
from linkcpp.node.connector import NodeConnector
from linkcpp.planning.records import Plan
from linkcpp.registry.edges import NODE_REVOKED
from linkcpp.registry.hub_location import parse_hub_node_url

# A busy node may take its time, a dead one must not hold everybody up.
CALL_SECONDS = 5.0

Discover = Callable[[], Awaitable[Iterable[str]]]


@dataclass(frozen=True)
class FoundNode:
    """A node of the plan that answered, and the client to talk to it with."""

    client: NodeClient
    record: NodeRecord
    url: str
    rtt_ms: float


async def find_nodes(
    plan: Plan, *, connector: NodeConnector, more_urls: Iterable[str], discover: Discover
) -> dict[NodeId, FoundNode]:
    """Find every node that holds a stage, whatever its address is now.

    ``discover`` gives the addresses of all nodes that can be seen, and is asked only where the
    known addresses do not lead to every node. The caller closes the clients.

    Raises:
        StepRefusedError: a node is missing or runs an engine that does not fit; names all of them.
    """
    wanted = remote_nodes(plan)
    if not wanted:
        return {}
    known = [url for node in wanted for url in plan.node_urls.get(node, ())]
    search = _Search(wanted, connector)
    try:
        await search.ask([*known, *more_urls])
        if search.missing:
            await search.ask(await discover())
        search.refuse_missing()
        _refuse_other_engines(plan, search.found)
    except BaseException:
        await asyncio.gather(*(node.client.aclose() for node in search.found.values()))
        raise
    return search.found


async def find_node(
    node_id: NodeId, name: str, *, connector: NodeConnector, urls: Iterable[str], discover: Discover
) -> FoundNode:
    """Find one node by its id, at the addresses given or else at those that ``discover`` gives.

    The caller closes the client.

    Raises:
        StepRefusedError: it cannot be found, or has another token.
    """
    search = _Search({node_id: name}, connector)
    try:
        await search.ask(urls)
        if search.missing:
            await search.ask(await discover())
        search.refuse_missing()
    except BaseException:
        await asyncio.gather(*(node.client.aclose() for node in search.found.values()))
        raise
    return search.found[node_id]


class _Search:
    """Asks addresses who is there, each once, and believes only who has proved itself.

    An address at a hub names its node, whom the edge proves: other nodes are not asked.
    """

    def __init__(self, wanted: dict[NodeId, str], connector: NodeConnector) -> None:
        self._wanted = wanted
        self._connector = connector
        self._asked: set[str] = set()
        self._rejections: list[WrongTokenError] = []
        self._impostors: list[OtherNodeError] = []
        self._revocations: list[NodeError] = []
        self.found: dict[NodeId, FoundNode] = {}

    @property
    def missing(self) -> list[NodeId]:
        return [node for node in self._wanted if node not in self.found]

    async def ask(self, urls: Iterable[str]) -> None:
        fresh = [url for url in dict.fromkeys(urls) if self._may_lead(url)]
        self._asked.update(fresh)
        await asyncio.gather(*(self._ask(url) for url in fresh))

    def _may_lead(self, url: str) -> bool:
        """Whether a node that is wanted may be at an address that was not asked yet."""
        through = parse_hub_node_url(url)
        return url not in self._asked and (through is None or through[1] in self._wanted)

    async def _ask(self, url: str) -> None:
        try:
            client = await self._connector.open(url, timeout_seconds=CALL_SECONDS)
        except WrongTokenError as error:
            self._rejections.append(error)
            return
        except NodeError as error:
            if error.code == NODE_REVOKED:
                self._revocations.append(error)
            return
        try:
            record = await client.node()
            asked_at = time.perf_counter()
            await client.echo(b"")
            rtt_ms = (time.perf_counter() - asked_at) * 1000
        except WrongTokenError as error:
            self._rejections.append(error)
        except OtherNodeError as error:
            self._impostors.append(error)
        except NodeError:
            pass
        else:
            # One node may answer at several addresses; the first to answer is the nearest.
            if record.node_id in self._wanted and record.node_id not in self.found:
                self.found[record.node_id] = FoundNode(client, record, url, rtt_ms)
                return
        await client.aclose()

    def refuse_missing(self) -> None:
        if not self.missing:
            return
        nodes = frozenset(self.missing)
        names = ", ".join(self._wanted[node] for node in self.missing)
        # Those who know why a node is not to be had tell more than that it is not found.
        if known := [*self._revocations, *self._rejections]:
            first = known[0]
            raise StepRefusedError(first.message, hint=first.hint, nodes=nodes)
        seen = "".join(f" {error.message}" for error in self._impostors[:1])
        raise NodeMissingError(
            f"The plan needs {names}, which cannot be found.{seen}",
            hint="Start `linkcpp node` there, name its address with --node, or make another plan "
            "with `linkcpp plan`.",
            nodes=nodes,
        )


def _refuse_other_engines(plan: Plan, found: dict[NodeId, FoundNode]) -> None:
    for node_id, node in found.items():
        name, nodes = node.record.name, frozenset({node_id})
        if problem := node.record.engine_problem:
            message = f"The engine of {name} cannot be used: {problem.message}"
            raise StepRefusedError(message, hint=problem.hint, nodes=nodes)
        if difference := compare_engines(plan.engine, node.record.engine):
            raise StepRefusedError(
                f"{name} cannot take part in this plan: {difference}.",
                hint="Install the build that the plan was made for there, or make another plan.",
                nodes=nodes,
            )
