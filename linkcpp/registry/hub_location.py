"""How a model of a hub is named in one text: ``hub+https://hub.example#model=NAME``. Pure."""

import re
from typing import NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.registry.models import NAME_PATTERN

_PREFIX = "hub+"
_LOCATION = re.compile(r"hub\+(?P<hub>https?://[^\s#?]+)#model=(?P<name>[^#]*)", re.IGNORECASE)
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
    """Read where a model of a hub is; ``None`` where it is no hub's.

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
