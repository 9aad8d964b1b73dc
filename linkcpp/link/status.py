"""What a link tells of itself."""

from enum import StrEnum

from linkcpp.common.records import Record
from linkcpp.link.choosing import PathKind


class ConnectionState(StrEnum):
    """Whether a link carries anything now; ``FAILED`` and ``CLOSED`` are for good."""

    CONNECTING = "connecting"
    UP = "up"
    RECONNECTING = "reconnecting"
    FAILED = "failed"
    CLOSED = "closed"


class LinkStatus(Record):
    """A link at the end that dials, for people and for ``linkcpp status``.

    ``path`` is the one in use and ``why`` the reason for it, in a sentence; ``problem`` is why
    there is none, or why the last one was lost. ``reconnect_count`` counts lost paths,
    ``change_count`` changes to a better one.
    """

    state: ConnectionState
    node_id: str | None
    link_id: str | None
    path: PathKind | None
    gateway_id: str | None
    why: str | None
    rtt_ms: float | None
    problem: str | None
    reconnect_count: int
    change_count: int
    stream_count: int
    sent_bytes: int
    received_bytes: int


def link_way(status: LinkStatus) -> str:
    """Say in words which way a link takes now, and why. Pure."""
    if status.state is ConnectionState.UP:
        again = f", restored {status.reconnect_count} times" if status.reconnect_count else ""
        trip = f" ({status.rtt_ms:.1f} ms)" if status.rtt_ms is not None else ""
        return f"{status.why or status.path}{trip}{again}"
    return f"{status.state.value}: {status.problem or 'no path yet'}"
