"""What a gateway of its own answers besides the relay: who it is, and its metrics."""

import hmac
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from linkcpp import __version__
from linkcpp.common.callers import is_this_machine
from linkcpp.common.metrics import METRICS_PATH, metrics_response
from linkcpp.common.records import ErrorBody, WireRecord
from linkcpp.gateway.relay import Relay
from linkcpp.registry.relay import RELAY_PATH

_PREFIX: Final = "linkcpp_gateway"


class GatewayHealth(WireRecord):
    """Which gateway answers."""

    service: str = "linkcpp-gateway"
    version: str
    gateway_id: str


class RelayCollector(Collector):
    """Reads a relay's counts when somebody asks for them."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def collect(self) -> Iterator[Metric]:
        """Return all metrics."""
        counts = self._relay.counts()
        yield GaugeMetricFamily(
            f"{_PREFIX}_edges", "Edges whose two sides are here.", value=counts.paired_edges
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}_unpaired_connections",
            "Connections that wait for their other side.",
            value=counts.unpaired_connections,
        )
        yield CounterMetricFamily(
            f"{_PREFIX}_pairs", "How often two sides met.", value=counts.pairs_made
        )
        yield CounterMetricFamily(
            f"{_PREFIX}_received_bytes",
            "Bytes received from both sides, framing included.",
            value=counts.received_bytes,
        )
        refused = CounterMetricFamily(
            f"{_PREFIX}_refused", "Requests that became no relay.", labels=["code"]
        )
        for code, number in counts.refused.items():
            refused.add_metric([code], number)
        yield refused
        closed = CounterMetricFamily(
            f"{_PREFIX}_closed", "Connections that the gateway closed.", labels=["code"]
        )
        for close_code, number in counts.closed.items():
            closed.add_metric([str(close_code)], number)
        yield closed


def create_app(relay: Relay, metrics_token: str) -> Starlette:
    """Make the application; metrics are for this machine itself and for holders of the token."""
    collector = RelayCollector(relay)

    async def health(_: Request) -> Response:
        told = GatewayHealth(version=__version__, gateway_id=relay.gateway_id)
        return JSONResponse(told.model_dump())

    async def metrics(request: Request) -> Response:
        peer = request.client.host if request.client else ""
        shown = request.headers.get("authorization", "").encode()
        is_known = hmac.compare_digest(shown, f"Bearer {metrics_token}".encode())
        if not is_known and not is_this_machine(peer, request.headers.raw):
            raise HTTPException(401, "Metrics are for this machine, or need the metrics token.")
        return metrics_response(collector.collect())

    async def not_upgraded(_: Request) -> Response:
        raise HTTPException(426, "The relay is spoken over a WebSocket.", {"Upgrade": "websocket"})

    return Starlette(
        routes=[
            Route("/v1/health", health),
            Route(METRICS_PATH, metrics),
            Route(RELAY_PATH, not_upgraded),
        ],
        exception_handlers={HTTPException: _refuse},
    )


_CODES: Final = {401: "unauthorized", 404: "not_found", 405: "not_allowed", 426: "no_websocket"}


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - what it is registered for
    code = _CODES.get(error.status_code, "refused")
    body = ErrorBody(code=code, message=error.detail)
    return JSONResponse(body.model_dump(), error.status_code, error.headers)
