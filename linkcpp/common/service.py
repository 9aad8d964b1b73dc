"""A verb of linkcpp that runs until it is stopped, as a service of the system."""

import os
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import jinja2

from linkcpp.common.logs import LOG_FORMAT_VARIABLE
from linkcpp.common.proxies import PROXY_VARIABLES
from linkcpp.common.resources import resource_folder
from linkcpp.common.systemd import quoted

_TEMPLATE = "systemd/linkcpp-service.service.j2"
# What changes where a service finds its folders, its token, its engine and its way to the network,
# and whom it trusts.
_VARIABLES = (
    "LINKCPP_HOME",
    "LINKCPP_TOKEN_FILE",
    "LINKCPP_ENGINE",
    "LINKCPP_TEMPLATES",
    "LINKCPP_DATABASE",
    LOG_FORMAT_VARIABLE,
    "SSL_CERT_FILE",
    "XDG_CONFIG_HOME",
    "XDG_STATE_HOME",
    "XDG_CACHE_HOME",
    "XDG_DATA_HOME",
    *PROXY_VARIABLES,
)


def service_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what a service must be given so that it runs as this program does now.

    Nothing with a password in it: a unit's file is no place for one.
    """
    return {
        name: environment[name]
        for name in _VARIABLES
        if name in environment and urlsplit(environment[name]).password is None
    }


def systemd_unit(
    verb: str,
    description: str,
    command: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Write a systemd unit that runs ``command`` with linkcpp's settings of ``environment``.

    ``verb`` names the unit (``linkcpp-VERB``), ``description`` says to people what runs.
    """
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource_folder("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - a unit file, not HTML; every value is quoted below
    )
    return templates.get_template(_TEMPLATE).render(
        verb=verb,
        description=description,
        command=" ".join(quoted(word) for word in command),
        environment=[
            quoted(f"{key}={value}") for key, value in service_environment(environment).items()
        ],
    )
