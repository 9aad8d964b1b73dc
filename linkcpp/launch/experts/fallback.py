"""How much memory this machine has for experts that no worker computes. Pure."""

from typing import NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import format_bytes
from linkcpp.planning.backbone import OWN_SERVER_BYTES, WORKER_SCRATCH_BYTES
from linkcpp.planning.records import Plan


class FallbackRoom(NamedTuple):
    """Room for ``size_bytes`` of experts; 0 where there is no fallback, and ``why_not`` then.

    ``warning`` is for the user where the plan leaves less RAM than is wanted.
    """

    size_bytes: int
    why_not: str | None = None
    warning: str | None = None


def free_bytes(plan: Plan) -> int:
    """What a plan leaves of the coordinator's RAM, without its reserve and another rpc-server."""
    memory = plan.coordinator_memory
    left = memory.available_bytes - memory.reserve_bytes - memory.used_bytes
    return max(0, left - WORKER_SCRATCH_BYTES - OWN_SERVER_BYTES)


def fallback_room(
    plan: Plan, *, asked_bytes: int | None, min_bytes: int | None, hub_url: str | None = None
) -> FallbackRoom:
    """Decide on the fallback's memory.

    ``asked_bytes`` is what the user gives it (0: nothing), ``None`` what the plan leaves free.
    ``min_bytes`` is what one expert of each kind takes; ``None`` where the whole model is not
    here; ``hub_url`` is then the hub that has it, if one does.

    Raises:
        LinkcppError: the user gives it less than that.
    """
    if asked_bytes == 0:
        return FallbackRoom(0, "--fallback-memory 0")
    if min_bytes is None:
        why = "the whole model is not on this machine"
        at_hub = f"no fallback for experts without worker: the model lies at {hub_url} only"
        return FallbackRoom(0, why, at_hub if hub_url else None)
    free = free_bytes(plan)
    if asked_bytes is None:
        if free >= min_bytes:
            return FallbackRoom(free)
        why = (
            f"the plan leaves {format_bytes(free)} of RAM here for it, and an expert takes "
            f"{format_bytes(min_bytes)}"
        )
        return FallbackRoom(0, f"no room: {why}", f"no fallback for experts without worker: {why}")
    if asked_bytes < min_bytes:
        raise LinkcppError(
            f"--fallback-memory {format_bytes(asked_bytes)} has no room for an expert, which takes "
            f"{format_bytes(min_bytes)}.",
            hint="Give it more, or 0 to have this machine compute none.",
        )
    if asked_bytes > free:
        warning = (
            f"--fallback-memory {format_bytes(asked_bytes)} is more than the "
            f"{format_bytes(free)} of RAM that the plan leaves here for it"
        )
        return FallbackRoom(asked_bytes, warning=warning)
    return FallbackRoom(asked_bytes)
