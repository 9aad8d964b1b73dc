"""A verb of linkcpp that runs until it is stopped, as a service of systemd."""

import os
import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from linkcpp.common.logs import LOG_FORMAT_VARIABLE
from linkcpp.common.proxies import PROXY_VARIABLES
from linkcpp.common.templates import render

_TEMPLATE = "systemd/linkcpp.service.j2"
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


def systemd_unit(
    name: str,
    description: str,
    command: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    *,
    own_templates: str | None = None,
) -> str:
    """Write the unit ``linkcpp-NAME``: it runs ``command`` with linkcpp's settings from here.

    Of ``environment`` the unit gets what makes the command run as this program does now, except
    what has a password in it: a unit's file is not the place. ``own_templates`` is a folder of
    the user's own templates.

    Raises:
        LinkcppError: the user's own template cannot be filled in.
    """
    given = {
        variable: environment[variable]
        for variable in _VARIABLES
        if variable in environment and urlsplit(environment[variable]).password is None
    }
    values = {
        "name": name,
        "description": description,
        "command": " ".join(_quoted(word) for word in command),
        "environment": [_quoted(f"{key}={value}") for key, value in given.items()],
    }
    return render(_TEMPLATE, values, own_templates=own_templates)


def _quoted(word: str) -> str:
    """Quote a word for a unit file (systemd.syntax(7)), specifiers and variables literal."""
    literal = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    literal = literal.replace("\n", "\\n")
    return literal if re.fullmatch(r"[\w@%+=:,./-]+", literal) else f'"{literal}"'
