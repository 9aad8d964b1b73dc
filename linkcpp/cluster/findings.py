"""From what was found at each address to the nodes that there are. Pure: no sockets, no clock."""

import ipaddress
import math
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from linkcpp.cluster.candidates import Finding, Probe
from linkcpp.cluster.records import DiscoveredNode, NodeId, NodeRecord, NodeStatus
from linkcpp.common.text import printable
from linkcpp.engine.records import EngineFingerprint, RpcVersion

_STATUS = {
    Finding.WRONG_TOKEN: NodeStatus.WRONG_TOKEN,
    Finding.NOT_A_NODE: NodeStatus.NOT_A_NODE,
}
# Which of several findings about one service tells most about it.
_MOST_TELLING_FIRST = (
    Finding.WRONG_TOKEN,
    Finding.NODE,
    Finding.NOT_A_NODE,
    Finding.NO_ANSWER,
)


def describe_nodes(probes: Iterable[Probe], coordinator: NodeRecord) -> tuple[DiscoveredNode, ...]:
    """Group probes by the node that answered, and say of each whether it can be used.

    Addresses that proved to be one node become one entry, the nearest address first. A service
    whose node was found at another address gives no second entry: a node behind ``docker0`` or
    with an address that is not routed here is simply found elsewhere. Ready nodes come first.
    """
    every = list(probes)
    by_id: dict[NodeId, list[Probe]] = {}
    for probe in every:
        if probe.record is not None:
            by_id.setdefault(probe.record.node_id, []).append(probe)
    nodes = [_proven(group, coordinator) for group in by_id.values()]
    nodes += _unproven([probe for probe in every if not _is_itself(probe)], by_id, coordinator)
    nodes = _tell_apart(nodes)
    return tuple(sorted(nodes, key=_order))


def compare_engines(
    coordinator: EngineFingerprint | None, node: EngineFingerprint | None
) -> str | None:
    """Say why a coordinator's llama-server cannot use a node's rpc-server; ``None`` if it can.

    The client aborts for another major version or a newer minor one of the server. The patch
    version counts changes of the operation numbers, with which graphs would mean something else,
    and the client does not check it: so it must be equal.
    """
    if coordinator is None or coordinator.rpc_version is None:
        return None  # nothing to compare with; the coordinator's own problem is told by `doctor`
    mine = coordinator.rpc_version
    if node is None or node.rpc_version is None:
        return "its engine tells no RPC version"
    theirs = node.rpc_version
    if _accepts(mine, theirs):
        return None
    return (
        f"its engine speaks RPC {theirs} ({node.label}), this machine's RPC {mine} "
        f"({coordinator.label}): install the same build on both (`linkcpp engine install`)"
    )


def _accepts(client: RpcVersion, server: RpcVersion) -> bool:
    return (
        client.major == server.major
        and server.minor <= client.minor
        and client.patch == server.patch
    )


def nearest_first(group: Iterable[Probe]) -> list[Probe]:
    """Order the addresses of one node: the nearest first, the same ones at every search.

    A link-local address means something on one interface only, and so comes last however near it
    is. Round trips within a millisecond or half of the best differ by chance: of such, IPv4 goes
    before IPv6, and then private networks before others.
    """
    probes = list(group)
    best = min((probe.link.rtt_ms for probe in probes if probe.link), default=math.inf)

    def rank(probe: Probe) -> tuple[bool, bool, bool, bool, str]:
        url = probe.candidate.url
        rtt_ms = probe.link.rtt_ms if probe.link else math.inf
        address = _address_in(url)
        return (
            address is not None and address.is_link_local,
            rtt_ms > best * 1.5 + 1.0,
            address is not None and address.version == 6,
            address is not None and not address.is_private,
            url,
        )

    return sorted(probes, key=rank)


def _address_in(url: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return None  # a name


def _proven(group: list[Probe], coordinator: NodeRecord) -> DiscoveredNode:
    nearest = nearest_first(group)
    record = nearest[0].record
    if record is None:
        raise ValueError("a group of proven probes has records")
    status, reason = usability(record, coordinator)
    names = sorted({probe.record.name for probe in group if probe.record})
    if len(names) > 1:
        status = NodeStatus.DUPLICATE_ID
        reason = (
            f"{' and '.join(names)} have one node id (a copied or shared home folder): "
            "delete `node-id` in the state folder of all but one and restart them"
        )
    return DiscoveredNode(
        name=record.name,
        urls=tuple(dict.fromkeys(probe.candidate.url for probe in nearest)),
        found_by=", ".join(sorted({probe.candidate.found_by for probe in group})),
        status=status,
        reason=reason,
        record=record,
        link=nearest[0].link,
        is_this_machine=record.node_id == coordinator.node_id,
    )


def usability(record: NodeRecord, coordinator: NodeRecord) -> tuple[NodeStatus, str | None]:
    """Say whether the coordinator can use a node, and in words why not."""
    if record.engine_problem is not None:
        problem = record.engine_problem
        return NodeStatus.ENGINE_PROBLEM, f"{problem.message} {problem.hint}".strip()
    if record.engine is None:
        return NodeStatus.ENGINE_PROBLEM, "it has no engine: run `linkcpp engine install` there"
    difference = compare_engines(coordinator.engine, record.engine)
    if difference is not None:
        return NodeStatus.OTHER_ENGINE, difference
    return NodeStatus.READY, None


def _is_itself(probe: Probe) -> bool:
    """Tell whether a node answered, and as the one that was advertised there."""
    claimed = probe.candidate.node_id
    return probe.record is not None and claimed in (None, probe.record.node_id)


def _unproven(
    probes: list[Probe], by_id: dict[NodeId, list[Probe]], coordinator: NodeRecord
) -> list[DiscoveredNode]:
    instances = {
        probe.candidate.url: probe.candidate.instance
        for probe in probes
        if probe.candidate.instance
    }
    services: dict[str, list[Probe]] = {}
    for probe in probes:
        candidate = probe.candidate
        # Somebody without the token who claims to be a known node stays in sight.
        is_suspect = probe.finding is Finding.WRONG_TOKEN
        if candidate.node_id in by_id and not is_suspect:
            continue
        service = candidate.instance or instances.get(candidate.url) or candidate.url
        services.setdefault(service, []).append(probe)
    return [_failed(group, coordinator) for group in services.values()]


def _failed(group: list[Probe], coordinator: NodeRecord) -> DiscoveredNode:
    telling = min(
        group,
        key=lambda probe: (
            _MOST_TELLING_FIRST.index(probe.finding),
            probe.candidate.instance is None,
        ),
    )
    same = [probe for probe in group if probe.finding == telling.finding]
    candidate = telling.candidate
    reason = "; ".join(sorted({probe.detail for probe in same if probe.detail}))
    if telling.record is not None:
        who = "this machine" if telling.record.node_id == coordinator.node_id else "another node"
        reason = f"advertised here, but the address is that of {who} ({telling.record.name})"
    elif telling.finding is Finding.NO_ANSWER and candidate.instance:
        reason = f"advertised, but switched off, gone or behind a firewall: {reason}"
    is_advertised = candidate.instance is not None
    unanswered = NodeStatus.STALE if is_advertised else NodeStatus.UNREACHABLE
    name = (telling.health.name if telling.health else None) or candidate.name or "unknown"
    return DiscoveredNode(
        name=printable(name),
        urls=tuple(dict.fromkeys(probe.candidate.url for probe in same)),
        found_by=", ".join(sorted({probe.candidate.found_by for probe in group})),
        status=_STATUS.get(telling.finding, unanswered),
        reason=reason,
        record=None,
        link=None,
    )


def _tell_apart(nodes: Sequence[DiscoveredNode]) -> list[DiscoveredNode]:
    """Add the start of the id to names that several nodes share.

    Only proven nodes count: a stranger must not be able to rename one.
    """
    names = [node.name for node in nodes if node.record is not None]
    return [
        node.model_copy(update={"name": f"{node.name} ({node.record.node_id[:4]})"})
        if node.record is not None and names.count(node.name) > 1
        else node
        for node in nodes
    ]


def _order(node: DiscoveredNode) -> tuple[bool, bool, str, tuple[str, ...]]:
    return (not node.is_this_machine, node.status is not NodeStatus.READY, node.name, node.urls)
