"""The members of a deployment: for each share of the plan one, here or on a node."""

from collections.abc import Iterable

from linkcpp.launch.experts.member import Circumstances, Member
from linkcpp.launch.experts.own_member import OwnMember
from linkcpp.launch.experts.remote_member import RemoteMember
from linkcpp.planning.records import ExpertShare


def members_of(shares: Iterable[ExpertShare], around: Circumstances) -> list[Member]:
    """Return a member for each share of a plan."""
    return [
        (OwnMember if share.is_coordinator else RemoteMember)(index, share, around)
        for index, share in enumerate(shares)
    ]
