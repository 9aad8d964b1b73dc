"""The node agent as a service of the system."""

import os
from collections.abc import Mapping, Sequence

import jinja2

from linkcpp.common.resources import resource_folder
from linkcpp.common.systemd import quoted

_TEMPLATE = "systemd/linkcpp-node.service.j2"
# What changes where the agent finds its folders, its token and its engine.
_VARIABLES = (
    "LINKCPP_HOME",
    "LINKCPP_TOKEN_FILE",
    "LINKCPP_ENGINE",
    "XDG_CONFIG_HOME",
    "XDG_STATE_HOME",
    "XDG_CACHE_HOME",
    "XDG_DATA_HOME",
)


def systemd_unit(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Write a systemd unit that runs ``command`` with linkcpp's settings of ``environment``."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource_folder("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - a unit file, not HTML; every value is quoted below
    )
    return templates.get_template(_TEMPLATE).render(
        command=" ".join(quoted(word) for word in command),
        environment=[
            quoted(f"{key}={environment[key]}") for key in _VARIABLES if key in environment
        ],
    )
