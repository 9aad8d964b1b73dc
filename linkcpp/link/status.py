"""What an edge tells of itself."""

from enum import StrEnum

from linkcpp.common.records import Record
from linkcpp.link.choosing import PathKind


class EdgeState(StrEnum):
    """Whether an edge carries anything now; ``FAILED`` and ``CLOSED`` are for good."""

    CONNECTING = "connecting"
    UP = "up"
    RECONNECTING = "reconnecting"
    FAILED = "failed"
    CLOSED = "closed"


class EdgeStatus(Record):
    """An edge at the coordinator, for people and for ``linkcpp status``.

    ``path`` is the one in use and ``why`` the reason for it, in a sentence; ``problem`` is why
    there is none, or why the last one was lost. ``reconnect_count`` counts lost paths,
    ``change_count`` changes to a better one.
    """

    state: EdgeState
    node_id: str | None
    edge_id: str | None
    path: PathKind | None
    gateway_id: str | None
    why: str | None
    rtt_ms: float | None
    problem: str | None
    reconnect_count: int
    change_count: int
    connection_count: int
    sent_bytes: int
    received_bytes: int
