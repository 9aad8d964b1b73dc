"""Settings of this machine: ``config.toml`` in the config folder.

::

    name = "attic"                          # default: the host name
    nodes = ["http://10.0.0.5:8716"]        # agents that mDNS does not reach
    engine = "/usr/local/llama.cpp"         # folder of the llama.cpp programs
    memory_limit = "6GB"                    # the most that this machine gives
    mdns = true                             # advertise and browse on the local network
"""

import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError

from linkcpp.common.config_file import config_path, read_config_file
from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record
from linkcpp.common.text import did_you_mean
from linkcpp.common.units import parse_bytes

DEFAULT_AGENT_PORT = 8716


def _read_size(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    try:
        return parse_bytes(str(value))
    except LinkcppError as error:
        raise ValueError(str(error)) from error


def _read_urls(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        return value
    try:
        return tuple(parse_node_url(item) for item in value)
    except LinkcppError as error:
        raise ValueError(str(error)) from error


class Config(Record):
    """The settings; each has a default, so the file need not exist."""

    name: Annotated[
        str | None, Field(description="The name that other machines see; by default the host name.")
    ] = None
    nodes: Annotated[
        tuple[str, ...],
        BeforeValidator(_read_urls),
        Field(description="Addresses of nodes that mDNS does not reach."),
    ] = ()
    engine: Annotated[
        Path | None,
        Field(
            description="Folder of the llama.cpp programs to use; by default the first that work."
        ),
    ] = None
    memory_limit_bytes: Annotated[
        int | None,
        BeforeValidator(_read_size),
        Field(
            alias="memory_limit",
            gt=0,
            lt=2**63,
            description="The most memory that this machine gives, such as 6GB; by default all.",
        ),
    ] = None
    mdns: Annotated[
        bool,
        Field(description="Whether to find nodes on the local network, and to be found there."),
    ] = True


class Setting(Record):
    """One key of the settings: what the file says, if it does, and what the key is for.

    ``value`` is ``None`` where the file omits the key; ``default`` is ``None`` where ``meaning``
    says what holds then. ``problem`` is a clause on what is wrong with the key or its value; of a
    key that does not exist, ``meaning`` asks whether a similar one was meant.
    """

    key: str
    value: Any = None
    default: Any = None
    meaning: str
    problem: str | None = None


def explain_settings(written: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Return each key there is, in order, then those of ``written`` that do not exist. Pure."""
    problems = _problems(written)
    known = {field.alias or name: field for name, field in Config.model_fields.items()}
    settings = [
        Setting(
            key=key,
            value=written.get(key),
            default=field.default or None,
            meaning=field.description or "",
            problem=problems.pop(key, None),
        )
        for key, field in known.items()
    ]
    unknown = (
        Setting(
            key=key,
            value=written.get(key),
            meaning=did_you_mean(key, known).rstrip(),
            problem=problem,
        )
        for key, problem in problems.items()
    )
    return (*settings, *unknown)


def load_config() -> Config:
    """Read the settings, or the defaults where there is no file.

    Raises:
        LinkcppError: the file is not TOML, or has a key or value that is not known.
    """
    written = read_config_file()
    check_settings(explain_settings(written))
    return Config.model_validate(written)


def check_settings(settings: Iterable[Setting]) -> None:
    """See that nothing is wrong with the settings.

    Raises:
        LinkcppError: the file has a key or value that is not known.
    """
    wrong = [each for each in settings if each.problem]
    if not wrong:
        return
    meant = next((each.meaning for each in wrong if each.meaning.endswith("?")), "")
    raise LinkcppError(
        f"{config_path()}: {'; '.join(each.problem or '' for each in wrong)}.",
        hint=f"{meant} `linkcpp config` lists the keys and what each is for.".strip(),
    )


def _problems(written: Mapping[str, Any]) -> dict[str, str]:
    """Say what is wrong, by key."""
    try:
        Config.model_validate(written)
    except ValidationError as error:
        return {str(each["loc"][0]): _explain(each) for each in reversed(error.errors())}
    return {}


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"the key {key!r} is not known"
    return f"{key}: {problem['msg'].removeprefix('Value error, ')}".rstrip(".")


def parse_node_url(text: str) -> str:
    """Read how a person names a node: ``10.0.0.5``, ``attic.local:9000``, ``https://host/path``.

    The scheme defaults to ``http`` and the port of plain HTTP to ``DEFAULT_AGENT_PORT``. An IPv6
    address with or without brackets is taken, and a zone (``fe80::1%eth0``) is kept.

    Raises:
        LinkcppError: it is not an HTTP address of a host.
    """
    # RFC 6874 writes the zone of an IPv6 address as %25eth0; sockets want %eth0.
    bare = text.strip().replace("%25", "%")
    if "://" not in bare:
        bare = f"http://{_bracket(bare)}"
    bare = bare.rstrip("/")
    try:
        parts = urlsplit(bare)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if "@" in bare:
        # Not echoed: it may have a password in it.
        raise LinkcppError(
            "The address of a node has no user name or password in it.",
            hint="The cluster token is what lets linkcpp in; `linkcpp token` tells about it.",
        )
    if (
        not host
        or port == 0
        or parts.scheme not in ("http", "https")
        or parts.query
        or parts.fragment
        or not bare.isprintable()
        or " " in bare
    ):
        raise LinkcppError(
            f"{text!r} is not the address of a node.",
            hint=f"Write it like 10.0.0.5:{DEFAULT_AGENT_PORT} or https://attic.example.",
        )
    if port is None:
        port = 443 if parts.scheme == "https" else DEFAULT_AGENT_PORT
    return node_url(host, port, scheme=parts.scheme) + parts.path


def node_url(host: str, port: int, *, scheme: str = "http") -> str:
    """Write the URL of an agent; IPv6 goes into brackets and keeps its zone."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _bracket(text: str) -> str:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return text
    return f"[{text}]"
