"""What ``linkcpp doctor`` looks at beyond the machine: token, hubs, local network, node agent."""

import asyncio
import secrets
from collections.abc import Iterable
from pathlib import Path

from linkcpp import __version__
from linkcpp.cluster.addresses import interface_addresses
from linkcpp.cluster.candidates import Candidate, Finding, Probe
from linkcpp.cluster.config import DEFAULT_AGENT_PORT, node_url
from linkcpp.cluster.mdns import open_zeroconf
from linkcpp.cluster.token import load_token, token_path
from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.node.diagnosis import Observation, Verdict, from_error
from linkcpp.node.probe import probe_node
from linkcpp.registry.connection import HubConnection
from linkcpp.registry.credentials import HubCredentials, list_credentials

_HUB_SECONDS = 3.0


async def look_at_network(*, uses_mdns: bool) -> list[Observation]:
    """Look at token, joined hubs, local network and node agent; takes a few seconds at most."""
    hubs, others = _joined_hubs()
    return [
        _look_at_token(has_hub=bool(hubs)),
        *others,
        *await asyncio.gather(*(_look_at_hub(hub) for hub in hubs)),
        await _look_at_mdns(is_wanted=uses_mdns),
        await look_at_agent(has_hub=bool(hubs)),
    ]


def _joined_hubs() -> tuple[tuple[HubCredentials, ...], Iterable[Observation]]:
    try:
        return list_credentials(), []
    except LinkcppError as error:
        return (), [from_error("hub", Verdict.FAIL, error)]
    except OSError:  # what is said of the settings folder tells why
        return (), []


async def _look_at_hub(hub: HubCredentials) -> Observation:
    """See whether a hub that this machine joined answers, and is still the same."""
    url = printable(hub.url, 200)
    joined = f"{url}, joined as {hub.node_token.role.value}"
    try:
        # How the address may look was decided when this machine joined.
        connection = HubConnection(hub.url, timeout_seconds=_HUB_SECONDS, allow_plain=True)
        async with asyncio.timeout(_HUB_SECONDS), connection:
            health = await connection.health()
    except (LinkcppError, TimeoutError):
        return Observation(
            subject="hub",
            verdict=Verdict.WARN,
            detail=f"{joined}: does not answer",
            hint="Its nodes cannot be used meanwhile. See whether the hub runs, and whether this "
            "machine has a way to it.",
        )
    if health.hub_id != hub.hub_id:
        return Observation(
            subject="hub",
            verdict=Verdict.FAIL,
            detail=f"{joined}: another hub answers there now",
            hint="Ask who runs it; `linkcpp join` joins the new one.",
        )
    detail = f"{joined}: answers (linkcpp {printable(health.version, 40)})"
    return Observation(subject="hub", verdict=Verdict.OK, detail=detail)


def _look_at_token(*, has_hub: bool) -> Observation:
    try:
        load_token()
    except LinkcppError as error:
        # Without a token this machine still serves itself; a token that others read is a hole.
        if _is_there(token_path()):
            return from_error("cluster token", Verdict.FAIL, error)
        if has_hub:
            detail = "none; nodes of a hub need none"
            return Observation(subject="cluster token", verdict=Verdict.OK, detail=detail)
        return from_error("cluster token", Verdict.WARN, error)
    detail = f"{token_path()}, for this user only"
    return Observation(subject="cluster token", verdict=Verdict.OK, detail=detail)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # Behind a folder that this user may not enter, for instance.
        return True


async def _look_at_mdns(*, is_wanted: bool) -> Observation:
    subject = "local network"
    addresses = [address for address in interface_addresses() if not address.is_loopback]
    if not addresses:
        return Observation(
            subject=subject,
            verdict=Verdict.WARN,
            detail="no interface but loopback is up",
            hint="Connect this machine to the network that the other machines are on.",
        )
    listed = ", ".join(str(address) for address in addresses[:4])
    if not is_wanted:
        detail = f"{listed}; mDNS is switched off in the settings"
        return Observation(subject=subject, verdict=Verdict.OK, detail=detail)
    try:
        await open_zeroconf(()).async_close()
    except LinkcppError as error:
        return from_error(subject, Verdict.WARN, error)
    return Observation(subject=subject, verdict=Verdict.OK, detail=f"{listed}; mDNS can be used")


async def look_at_agent(port: int = DEFAULT_AGENT_PORT, *, has_hub: bool = False) -> Observation:
    """See whether this machine's node agent answers, and as what.

    ``has_hub`` tells that the machine joined a hub, and so may do without a cluster token.
    """
    subject = f"node agent (port {port})"
    try:
        own_token = load_token()
    except LinkcppError:
        own_token = None
    # Any token does to find out who answers.
    token = own_token or secrets.token_urlsafe(32)
    candidate = Candidate(url=node_url("127.0.0.1", port), found_by="doctor")
    try:
        probe = await probe_node(candidate, token)
    except LinkcppError as error:
        return from_error(subject, Verdict.WARN, error)
    return _judge_agent(subject, probe, has_token=own_token is not None, has_hub=has_hub)


def _judge_agent(subject: str, probe: Probe, *, has_token: bool, has_hub: bool) -> Observation:
    if probe.finding is Finding.NO_ANSWER:
        return Observation(
            subject=subject,
            verdict=Verdict.OK,
            detail="does not run here",
            hint="Start `linkcpp node` if this machine is to give its memory to the cluster.",
        )
    if probe.health is None or probe.finding is Finding.NOT_A_NODE:
        return Observation(
            subject=subject,
            verdict=Verdict.WARN,
            detail="another program has the port",
            hint="Start `linkcpp node --port N` with a free port, or end the other program.",
        )
    detail = f"runs as {probe.health.name}, linkcpp {probe.health.agent_version}"
    if not has_token:
        return Observation(
            subject=subject,
            verdict=Verdict.OK if has_hub else Verdict.WARN,
            detail=f"{detail}; there is no cluster token here to use it with",
            hint=None if has_hub else "`linkcpp token set` takes over the token of its cluster.",
        )
    if probe.finding is not Finding.NODE:
        return Observation(
            subject=subject,
            verdict=Verdict.FAIL,
            detail=f"{detail}, but {probe.detail}",
            hint="Restart `linkcpp node`: it keeps the token that it was started with. Where it is "
            "another user's, start yours with --port N.",
        )
    if probe.health.agent_version != __version__:
        return Observation(
            subject=subject,
            verdict=Verdict.WARN,
            detail=f"{detail}; this is linkcpp {__version__}",
            hint="Restart `linkcpp node`.",
        )
    return Observation(subject=subject, verdict=Verdict.OK, detail=detail)
