"""A virtual device's counts as Prometheus metrics. Pure."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from linkcpp.dispatch.control import DispatchStatus, WorkerStatus

_PREFIX = "linkcpp_dispatch"
_TOTALS = {
    "call_count": ("calls", "Calls for experts of one layer."),
    "pair_count": ("pairs", "(Token, expert) pairs that were wanted."),
    "rerouted_pair_count": ("rerouted_pairs", "Pairs that were asked for again elsewhere."),
    "failed_call_count": ("failed_calls", "Calls in which nobody could compute a pair."),
    "failed_pair_count": ("failed_pairs", "Pairs that nobody could compute."),
    "late_count": ("late_answers", "Answers of workers that came too late."),
    "nonsense_count": ("nonsense_answers", "Answers of workers that could not be right."),
    "spot_check_count": ("spot_checks", "Experts of a step that somebody else computed too."),
    "spot_pair_count": ("spot_checked_pairs", "Pairs that somebody else computed too."),
    "spot_skipped_count": ("spot_checks_skipped", "Spot checks that nobody could do in time."),
    "difference_count": ("differences", "Spot checks whose rows differed."),
}
_OF_WORKERS = {
    "pair_count": ("worker_pairs", "Pairs that a worker computed."),
    "request_count": ("worker_requests", "Requests to a worker."),
    "failure_count": ("worker_failures", "Requests to a worker that failed."),
    "sent_bytes": ("worker_sent_bytes", "Bytes sent to a worker."),
    "received_bytes": ("worker_received_bytes", "Bytes received from a worker."),
}


def dispatch_metrics(status: DispatchStatus) -> Iterator[Metric]:
    """Return all metrics; workers are told apart by the label ``worker``."""
    for field, (name, what) in _TOTALS.items():
        yield CounterMetricFamily(f"{_PREFIX}_{name}", what, value=getattr(status, field))
    yield GaugeMetricFamily(
        f"{_PREFIX}_missing_experts",
        "(Layer, expert) units that no worker has now.",
        value=status.missing_expert_count,
    )
    if status.fallback is not None:
        yield CounterMetricFamily(
            f"{_PREFIX}_fallback_pairs",
            "Pairs that the coordinator computed itself.",
            value=status.fallback.pair_count,
        )
    yield _up(status.workers)
    for field, (name, what) in _OF_WORKERS.items():
        family = CounterMetricFamily(f"{_PREFIX}_{name}", what, labels=["worker"])
        for worker in status.workers:
            family.add_metric([worker.name], getattr(worker, field))
        yield family


def _up(workers: tuple[WorkerStatus, ...]) -> Metric:
    family = GaugeMetricFamily(
        f"{_PREFIX}_worker_up", "Whether a worker is used.", labels=["worker"]
    )
    for worker in workers:
        family.add_metric([worker.name], float(worker.state == "up"))
    return family
