"""Prometheus metrics as text, from values that were just read."""

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import Response

METRICS_PATH: Final = "/metrics"


class _Read(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = tuple(metrics)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def metrics_response(metrics: Iterable[Metric]) -> Response:
    """Answer a scrape with these metrics."""
    registry = CollectorRegistry()
    registry.register(_Read(metrics))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
