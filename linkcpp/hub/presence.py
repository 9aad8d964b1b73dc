"""Who is there, told from when they were last heard. Pure."""

from linkcpp.registry.edges import GATEWAY_HEARTBEAT_SECONDS
from linkcpp.registry.records import HEARTBEAT_SECONDS, Presence

_STALE_AFTER_MISSED = 3
_GONE_AFTER_MISSED = 10
_GATEWAY_GONE_AFTER_MISSED = 3


def presence(last_seen: float | None, now: float, left_at: float | None = None) -> Presence:
    """Tell whether a node's heartbeats come: stale after three missed ones, gone after ten.

    The first one is missed when its time has come and it has not. A node that said that it leaves
    is gone at once: ``left_at`` is ``None`` again once it was heard after that. One that was heard
    in a time to come was heard before the clock was set back; if it lives, it is heard again soon.
    """
    if last_seen is None or left_at is not None:
        return Presence.GONE
    missed = (now - last_seen) / HEARTBEAT_SECONDS
    if not -1 < missed < _GONE_AFTER_MISSED:
        return Presence.GONE
    return Presence.STALE if missed >= _STALE_AFTER_MISSED else Presence.ONLINE


def is_gateway_online(last_seen: float, now: float) -> bool:
    """Tell whether a gateway may be given edges."""
    return now - last_seen < _GATEWAY_GONE_AFTER_MISSED * GATEWAY_HEARTBEAT_SECONDS
