"""What a node tells of itself as Prometheus metrics. Pure."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from linkcpp.cluster.records import NodeRecord
from linkcpp.link.acceptor import AcceptedStatus
from linkcpp.node.records import ServerRecord, SliceRecord, WorkerRecord

_PREFIX = "linkcpp_node"


def node_metrics(
    record: NodeRecord,
    servers: Iterable[ServerRecord],
    workers: Iterable[WorkerRecord],
    slices: Iterable[SliceRecord],
    edges: Iterable[AcceptedStatus],
) -> Iterator[Metric]:
    """Return all metrics."""
    yield from _memory(record)
    yield _by_state("servers", "The rpc-servers of this node.", [s.state for s in servers])
    yield _by_state("workers", "The expert workers of this node.", [w.state for w in workers])
    yield _slice_bytes(slices)
    yield from _edges(edges)


def _memory(record: NodeRecord) -> Iterator[Metric]:
    for field, what in (
        ("offered_bytes", "Memory that a deployment may use now."),
        ("free_bytes", "Memory that is free."),
        ("total_bytes", "Memory of the device."),
    ):
        family = GaugeMetricFamily(f"{_PREFIX}_{field}", what, labels=["device"])
        for device in record.devices:
            family.add_metric([device.name], getattr(device, field))
        yield family


def _by_state(name: str, what: str, states: list[str]) -> Metric:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", what, labels=["state"])
    for state in sorted(set(states)):
        family.add_metric([str(state)], states.count(state))
    return family


def _slice_bytes(slices: Iterable[SliceRecord]) -> Metric:
    total = sum(record.received_bytes for record in slices)
    return GaugeMetricFamily(f"{_PREFIX}_slice_bytes", "Slices on the disk.", value=total)


def _edges(edges: Iterable[AcceptedStatus]) -> Iterator[Metric]:
    known = list(edges)
    ways = [edge.path or "none" for edge in known]
    family = GaugeMetricFamily(f"{_PREFIX}_edges", "Edges, by the way they take.", labels=["way"])
    for way in sorted(set(ways)):
        family.add_metric([way], ways.count(way))
    yield family
    for field, what in (
        ("sent_bytes", "Bytes sent over edges that are open."),
        ("received_bytes", "Bytes received over edges that are open."),
    ):
        total = sum(getattr(edge, field) for edge in known)
        yield CounterMetricFamily(f"{_PREFIX}_edge_{field}", what, value=total)
