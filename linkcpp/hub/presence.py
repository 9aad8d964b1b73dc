"""Who is there, told from when they were last heard. Pure."""

from linkcpp.registry.edges import GATEWAY_HEARTBEAT_SECONDS
from linkcpp.registry.records import HEARTBEAT_SECONDS, Presence

_STALE_AFTER_MISSED = 3
_GONE_AFTER_MISSED = 10
_GATEWAY_GONE_AFTER_MISSED = 3


def presence(last_seen: float | None, now: float, left_at: float | None = None) -> Presence:
    """Tell whether a node's heartbeats come: stale after three missed ones, gone after ten.

    The first one is missed when its time has come and it has not. A node that said that it leaves
    is gone at once.
    """
    if last_seen is None or has_left(last_seen, left_at):
        return Presence.GONE
    missed = (now - last_seen) / HEARTBEAT_SECONDS
    if missed >= _GONE_AFTER_MISSED:
        return Presence.GONE
    return Presence.STALE if missed >= _STALE_AFTER_MISSED else Presence.ONLINE


def has_left(last_seen: float | None, left_at: float | None) -> bool:
    """Tell whether a node said that it leaves, and was not heard since."""
    return left_at is not None and (last_seen is None or last_seen <= left_at)


def is_gateway_online(last_seen: float, now: float) -> bool:
    """Tell whether a gateway may be given edges."""
    return now - last_seen < _GATEWAY_GONE_AFTER_MISSED * GATEWAY_HEARTBEAT_SECONDS
