"""How a model or a node of a hub is named in one text: ``hub+https://hub.example#…``. Pure."""

import re
from typing import NamedTuple

from linkcpp.cluster.records import NodeId
from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.registry.models import NAME_PATTERN

_PREFIX = "hub+"
_LOCATION = re.compile(r"hub\+(?P<hub>https?://[^\s#?]+)#model=(?P<name>[^#]*)", re.IGNORECASE)
_NODE = re.compile(r"hub\+(?P<hub>https?://[^\s#]+)#(?P<node>[0-9a-f-]{36})")
_NAME = re.compile(NAME_PATTERN)


class HubLocation(NamedTuple):
    """The hub at ``hub_url``, and what it calls the model."""

    hub_url: str
    name: str

    @property
    def text(self) -> str:
        """The text that ``parse_hub_location`` reads."""
        return f"{_PREFIX}{self.hub_url.rstrip('/')}#model={self.name}"


def may_be_hub_name(text: str) -> bool:
    """Whether a hub could call a model so."""
    return _NAME.fullmatch(text) is not None


def parse_hub_location(text: str) -> HubLocation | None:
    """Read where a model of a hub is; ``None`` where it is not a hub's.

    Raises:
        LinkcppError: it begins as one and goes on as none.
    """
    if not text.lower().startswith(_PREFIX):
        return None
    found = _LOCATION.fullmatch(text)
    if found is None or not may_be_hub_name(found["name"]):
        raise LinkcppError(
            f"{printable(text, 200)} does not name a model of a hub.",
            hint="Write hub+https://hub.example#model=NAME, or the name and --hub URL.",
        )
    return HubLocation(found["hub"].rstrip("/"), found["name"])


def hub_node_url(hub_url: str, node_id: NodeId) -> str:
    """Write where a node is that is reached through a hub: ``hub+https://hub.example#<id>``."""
    return f"{_PREFIX}{hub_url.rstrip('/')}#{node_id}"


def parse_hub_node_url(url: str) -> tuple[str, NodeId] | None:
    """Read the hub's address and the node's id; ``None`` where it is another kind of address."""
    found = _NODE.fullmatch(url)
    return (found["hub"], NodeId(found["node"])) if found else None


def is_hub_node_url(url: str) -> bool:
    """Whether this names a node through a hub."""
    return url.startswith(_PREFIX)
