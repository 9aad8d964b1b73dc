"""What the hub tells Prometheus."""

from collections import Counter as Count
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from linkcpp import __version__
from linkcpp.gateway.app import RelayCollector
from linkcpp.gateway.relay import Relay
from linkcpp.hub.directory import Directory
from linkcpp.hub.presence import presence
from linkcpp.hub.writer import BatchReport
from linkcpp.registry.records import Presence, Role

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "WEBSOCKET"))
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class HubMetrics:
    """Counters of one hub, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "linkcpp_hub_requests",
            "Calls by route and status.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._request_seconds = Histogram(
            "linkcpp_hub_request_seconds",
            "How long calls took.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._writes = Counter(
            "linkcpp_hub_writes", "Rows and jobs that were committed.", registry=self.registry
        )
        self._commit_seconds = Histogram(
            "linkcpp_hub_commit_seconds",
            "How long a group commit took.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._machines = Gauge(
            "linkcpp_hub_machines",
            "Machines that are not revoked, by role and presence.",
            ("role", "presence"),
            registry=self.registry,
        )
        build = Gauge("linkcpp_build", "Version.", ("version",), registry=self.registry)
        build.labels(__version__).set(1)

    def observe_request(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """Count a call. Unknown routes and odd methods share a label, for there may be any."""
        if route is None or method not in _METHODS:
            method, route = "", "unknown"
        self._requests.labels(method, route, str(status)).inc()
        if status != 101:  # a WebSocket takes as long as it is open
            self._request_seconds.labels(route).observe(seconds)

    def observe_commit(self, report: BatchReport) -> None:
        """Count a group commit."""
        self._writes.inc(report.write_count)
        self._commit_seconds.observe(report.seconds)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Tell a number that is read when somebody asks for it."""
        Gauge(f"linkcpp_hub_{name}", text, registry=self.registry).set_function(read)

    def add_relay(self, relay: Relay) -> None:
        """Tell also of a relay in this process."""
        self.registry.register(RelayCollector(relay))

    def render(self, directory: Directory, now: float) -> bytes:
        """Write all in Prometheus' text format."""
        counts = Count(
            (machine.role, presence(machine.last_seen, now, machine.left_at))
            for machine in directory.machines.values()
            if machine.revoked_at is None
        )
        for role in Role:
            for state in Presence:
                self._machines.labels(role.value, state.value).set(counts[role, state])
        return generate_latest(self.registry)
