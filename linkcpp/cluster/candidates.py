"""Addresses that may be nodes, and what asking them found out."""

from enum import StrEnum

from linkcpp.cluster.records import Health, LinkSpeed, NodeId, NodeRecord
from linkcpp.common.records import Record


class Candidate(Record):
    """An address that may be a node's, and what the source claims of it.

    ``instance`` names the mDNS service that it comes from; a person's URL has none.
    """

    url: str
    found_by: str
    instance: str | None = None
    node_id: NodeId | None = None
    name: str | None = None


class Finding(StrEnum):
    """What a probe found out about an address."""

    NODE = "node"
    WRONG_TOKEN = "wrong_token"  # noqa: S105 - a finding, not a credential
    NOT_A_NODE = "not_a_node"
    NO_ANSWER = "no_answer"


class Probe(Record):
    """The outcome of asking one candidate; ``detail`` says in words what stands in the way."""

    candidate: Candidate
    finding: Finding
    detail: str | None = None
    health: Health | None = None
    record: NodeRecord | None = None
    link: LinkSpeed | None = None
