"""How much memory the coordinator has for experts that no worker computes."""

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.launch.experts.events import FallbackChosen, apply_to_experts
from linkcpp.launch.experts.fallback import FallbackRoom, fallback_room, free_bytes
from linkcpp.launch.experts.records import ExpertsState
from linkcpp.planning.backbone import OWN_SERVER_BYTES, WORKER_SCRATCH_BYTES
from linkcpp.planning.records import Plan
from tests.launch.plans import MEGABYTE, layers_plan

EXPERT_BYTES = 20 * MEGABYTE
WORKER_BYTES = OWN_SERVER_BYTES + WORKER_SCRATCH_BYTES


def plan_with(left_bytes: int) -> Plan:
    """A plan whose coordinator has so much RAM left, the reserve not counted."""
    plan = layers_plan("a")
    memory = plan.coordinator_memory
    offered = memory.used_bytes + memory.reserve_bytes + left_bytes
    changed = memory.model_copy(update={"available_bytes": offered})
    return plan.model_copy(update={"coordinator_memory": changed})


def room(left_bytes: int, asked: int | None, least: int | None = EXPERT_BYTES) -> FallbackRoom:
    return fallback_room(plan_with(left_bytes), asked_bytes=asked, min_bytes=least)


def test_it_gets_what_the_plan_leaves_and_no_more() -> None:
    left = WORKER_BYTES + 3 * EXPERT_BYTES
    assert room(left, None) == FallbackRoom(3 * EXPERT_BYTES)
    assert room(WORKER_BYTES + EXPERT_BYTES, None).size_bytes == EXPERT_BYTES


def test_where_the_plan_leaves_too_little_there_is_none_and_it_is_told() -> None:
    found = room(WORKER_BYTES + EXPERT_BYTES - 1, None)
    assert found.size_bytes == 0
    assert found.why_not is not None
    assert "no room" in found.why_not
    assert found.warning is not None
    full = room(-5 * MEGABYTE, None)
    assert full.size_bytes == free_bytes(plan_with(-5 * MEGABYTE)) == 0


def test_the_users_own_number_counts_and_is_commented_on() -> None:
    left = WORKER_BYTES + 3 * EXPERT_BYTES
    assert room(left, 2 * EXPERT_BYTES) == FallbackRoom(2 * EXPERT_BYTES)
    more = room(left, 4 * EXPERT_BYTES)
    assert more.size_bytes == 4 * EXPERT_BYTES
    assert more.warning is not None
    assert "more than" in more.warning
    with pytest.raises(LinkcppError, match="no room for an expert"):
        room(left, EXPERT_BYTES - 1)


def test_none_is_wanted_or_possible() -> None:
    assert room(2**40, 0).size_bytes == 0
    assert room(2**40, None, least=None).why_not == "the whole model is not on this machine"
    assert room(2**40, EXPERT_BYTES, least=None).size_bytes == 0


def test_status_has_why_there_is_none() -> None:
    state = apply_to_experts(ExpertsState(workers=()), FallbackChosen(0, "no room: …"))
    assert (state.has_fallback, state.fallback_absence) == (False, "no room: …")
    state = apply_to_experts(state, FallbackChosen(7, None))
    assert (state.has_fallback, state.fallback_bytes, state.fallback_absence) == (True, 7, None)
