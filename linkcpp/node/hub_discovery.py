"""The nodes that a hub knows, as discovery describes nodes; and both kinds in one list."""

import asyncio
from collections.abc import Collection, Iterable, Mapping

from linkcpp.cluster.config import load_config
from linkcpp.cluster.findings import usability
from linkcpp.cluster.identity import load_identity
from linkcpp.cluster.measure import this_machine
from linkcpp.cluster.records import DiscoveredNode, LinkSpeed, NodeRecord, NodeStatus
from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable, printable_json
from linkcpp.engine.records import Engine
from linkcpp.node.discovery import DISCOVER_SECONDS, Discovery, OnChange, find_nodes
from linkcpp.registry.client import HubClient, joined_client
from linkcpp.registry.connection import HubError
from linkcpp.registry.hub_location import hub_node_url, is_hub_node_url, parse_hub_node_url
from linkcpp.registry.records import NodeList, Presence, RegisteredNode, Role
from linkcpp.registry.relay_rtt import relay_rtts_ms


async def find_everywhere(
    engine: Engine | None,
    *,
    hub_urls: Collection[str],
    urls: Collection[str] = (),
    use_mdns: bool = True,
    timeout_seconds: float = DISCOVER_SECONDS,
    known: Collection[DiscoveredNode] = (),
    on_change: OnChange | None = None,
) -> Discovery:
    """Find nodes around (``find_nodes``) and at hubs; ``urls`` may name nodes of hubs too.

    A machine that has only joined a hub needs no cluster token: then only the hubs are asked. A hub
    that does not answer, or refuses, becomes a note and one of ``unanswered_hub_urls``.

    Raises:
        LinkcppError: as ``find_nodes`` where no hub is asked; this machine did not join a hub.
    """
    pointed = [parse_hub_node_url(url) for url in urls if is_hub_node_url(url)]
    hubs = dict.fromkeys([*hub_urls, *(hub for hub, _ in filter(None, pointed))])
    clients = [joined_client(url) for url in hubs]
    near_urls = [url for url in urls if not is_hub_node_url(url)]
    try:
        found = await find_nodes(
            engine,
            urls=near_urls,
            use_mdns=use_mdns,
            timeout_seconds=timeout_seconds,
            known=[node for node in known if not any(map(is_hub_node_url, node.urls))],
            on_change=on_change,
        )
    except LinkcppError:
        if not clients or near_urls:
            raise
        found = await _alone(engine)
    for client in clients:
        async with client:
            try:
                found = with_hub_nodes(found, await hub_nodes(client, found.coordinator))
            except HubError as error:
                found = found.model_copy(
                    update={
                        "notes": (*found.notes, str(error)),
                        "unanswered_hub_urls": (*found.unanswered_hub_urls, client.url),
                    }
                )
    return found


async def _alone(engine: Engine | None) -> Discovery:
    config = load_config()
    coordinator = await asyncio.to_thread(
        this_machine,
        engine,
        identity=load_identity(config.name),
        memory_limit_bytes=config.memory_limit_bytes,
    )
    return Discovery(coordinator=coordinator, nodes=(), notes=())


async def hub_nodes(client: HubClient, coordinator: NodeRecord) -> tuple[DiscoveredNode, ...]:
    """Ask a hub for its nodes, which it asks in turn, and measure how far its gateways are.

    Raises:
        HubError: it does not answer, or this machine may not ask.
    """
    listed = await client.nodes(ask=True)
    gateways = await client.gateways()
    rtts_ms = await relay_rtts_ms(gateways.gateways)
    return describe_registered(listed, coordinator, hub_url=client.url, rtts_ms=rtts_ms)


def describe_registered(
    listed: NodeList,
    coordinator: NodeRecord,
    *,
    hub_url: str,
    rtts_ms: Mapping[str, float],
) -> tuple[DiscoveredNode, ...]:
    """Describe the nodes of a hub that are there or were a moment ago. Pure.

    ``rtts_ms`` are this machine's round trips to gateways. What a path over one costs is the sum of
    both ways to it; the shortest is taken.
    """
    nodes = [
        _described(node, listed.hub_time, coordinator, hub_url, rtts_ms)
        for node in listed.nodes
        if node.role is Role.NODE and not node.is_revoked and node.presence is not Presence.GONE
    ]
    return tuple(sorted(nodes, key=lambda node: (node.status is not NodeStatus.READY, node.name)))


def _described(
    node: RegisteredNode,
    hub_time: float,
    coordinator: NodeRecord,
    hub_url: str,
    rtts_ms: Mapping[str, float],
) -> DiscoveredNode:
    record: NodeRecord | None = None
    status, reason = NodeStatus.STALE, "it has joined, and told nothing of itself yet"
    if node.state is not None:
        # Every text of a peer may end on a terminal.
        record = NodeRecord.model_validate(
            printable_json(node.state.record.model_dump(mode="json"))
        )
        status, known = usability(record, coordinator)
        reason = known or ""
        if record.node_id != node.node_id:
            record, status, reason = None, NodeStatus.NOT_A_NODE, "it tells of another machine"
    if (node.is_silent or node.presence is Presence.STALE) and node.last_seen is not None:
        silent_seconds = max(0.0, hub_time - node.last_seen)
        reason = f"the hub has not heard of it for {silent_seconds:.0f} seconds"
        if node.is_silent:
            reason += ", and it does not answer now"
        status = NodeStatus.STALE
    return DiscoveredNode(
        name=printable(node.name),
        urls=(hub_node_url(hub_url, node.node_id),),
        found_by="hub",
        status=status,
        reason=reason or None,
        record=record,
        link=_relayed_link(node, rtts_ms),
        is_this_machine=node.node_id == coordinator.node_id,
    )


def _relayed_link(node: RegisteredNode, rtts_ms: Mapping[str, float]) -> LinkSpeed | None:
    theirs = node.state.relay_rtts_ms if node.state else {}
    sums = [rtts_ms[gateway] + rtt for gateway, rtt in theirs.items() if gateway in rtts_ms]
    return LinkSpeed(rtt_ms=max(min(sums), 0.001), bytes_per_second=None) if sums else None


def with_hub_nodes(found: Discovery, far: Iterable[DiscoveredNode]) -> Discovery:
    """Add the nodes of a hub to those of the network around. Pure.

    A node that is both gets one entry: the near address first, the hub's as the way out.
    """
    by_id = {node.record.node_id: node for node in found.nodes if node.record is not None}
    others = [node for node in found.nodes if node.record is None]
    for node in far:
        if node.record is None:
            others.append(node)
            continue
        near = by_id.get(node.record.node_id)
        by_id[node.record.node_id] = node if near is None else _merged(near, node)
    return found.model_copy(update={"nodes": (*by_id.values(), *others)})


def _merged(near: DiscoveredNode, far: DiscoveredNode) -> DiscoveredNode:
    first, second = (
        (near, far) if near.status is NodeStatus.READY or near.is_this_machine else (far, near)
    )
    return first.model_copy(
        update={
            "urls": tuple(dict.fromkeys((*first.urls, *second.urls))),
            "found_by": ", ".join(dict.fromkeys((first.found_by, second.found_by))),
        }
    )
