"""What a node tells its hub, and when."""

import pytest

from linkcpp.cluster.records import NodeRecord
from linkcpp.node.membership import has_news
from linkcpp.registry.records import NodeState
from tests.cluster.peers import fingerprint, node_record

GATEWAY = "00000000-0000-4000-8000-0000000000f1"


def state(record: NodeRecord | None = None, **rtts_ms: float) -> NodeState:
    return NodeState(
        record=record or node_record(),
        relay_rtts_ms={GATEWAY: rtts_ms["rtt_ms"]} if rtts_ms else {},
    )


def offering(offered_bytes: int) -> NodeRecord:
    record = node_record()
    cpu = record.devices[0].model_copy(update={"offered_bytes": offered_bytes, "free_bytes": 1})
    return record.model_copy(update={"devices": (cpu,)})


@pytest.mark.parametrize(
    "now",
    [
        state(offering(3 * 10**9)),
        state(offering(0)),
        state(node_record(engine=fingerprint("7.0.0"))),
        state(node_record(devices=())),
        state(rtt_ms=20.0),
        state().model_copy(update={"direct_urls": ("ws://10.0.0.5:8716/v1/edge",)}),
    ],
)
def test_what_a_plan_would_notice_is_news(now: NodeState) -> None:
    assert has_news(state(), now)


def test_what_moves_all_the_time_is_no_news() -> None:
    assert not has_news(state(), state(offering(5 * 10**9 - 9 * 10**7)))
    assert not has_news(state(rtt_ms=20.0), state(rtt_ms=24.0))
    assert has_news(state(rtt_ms=20.0), state(rtt_ms=26.0))
