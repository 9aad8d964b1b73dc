"""Ask one address who is there: a link first, then what the node has.

A peer that lies, drips or stalls costs its own deadline and nothing else.
"""

import asyncio
from typing import TypeVar

import httpx
from pydantic import ValidationError

from linkcpp.cluster.candidates import Candidate, Finding, Probe
from linkcpp.cluster.records import Health, LinkSpeed, NodeRecord
from linkcpp.common.http_client import PROXY_STATUSES, AnswerTooLongError, read_bounded
from linkcpp.common.network_errors import in_words
from linkcpp.common.records import WireRecord
from linkcpp.common.text import printable, printable_json
from linkcpp.link.transport import TransportLostError
from linkcpp.node.client import (
    NodeClient,
    NodeError,
    OtherNodeError,
    WrongTokenError,
)
from linkcpp.node.connector import open_client
from linkcpp.registry.trust import tls_context

# A node that computes with all its cores answers late.
PROBE_SECONDS = 3.0

_R = TypeVar("_R", bound=WireRecord)

_SERVICE = "linkcpp-node"
_NOT_A_NODE = "not_a_node"
_UNFIT = "what answers is not a linkcpp node of a version that fits"
_MAX_HEALTH_BYTES = 16 * 2**10


async def probe_node(
    candidate: Candidate, token: str, *, deadline_seconds: float = PROBE_SECONDS
) -> Probe:
    """Find out what is at an address; never raises for anything that a peer does.

    A node's round trip is measured on the way; ``measure`` adds the throughput.
    """
    try:
        async with asyncio.timeout(deadline_seconds):
            client = await open_client(candidate.url, token, timeout_seconds=deadline_seconds)
            async with client:
                return await _ask(client, candidate)
    except TimeoutError:
        return no_answer(candidate, f"no answer within {deadline_seconds:g} s")
    except WrongTokenError:
        return await _stranger(candidate, Finding.WRONG_TOKEN, "it has another cluster token")
    except OtherNodeError:
        return _found(candidate, Finding.NOT_A_NODE, "it gives two different node ids")
    except (NodeError, TransportLostError) as error:
        if isinstance(error, NodeError) and error.code == _NOT_A_NODE:
            return _found(candidate, Finding.NOT_A_NODE, _UNFIT)
        detail = error.told if isinstance(error, NodeError) else str(error)
        return await _stranger(candidate, Finding.NO_ANSWER, detail)


async def measure(probe: Probe, token: str) -> LinkSpeed | None:
    """Measure the round trip and the throughput to a node that was found; ``None`` for neither."""
    try:
        async with await open_client(probe.candidate.url, token, timeout_seconds=3.0) as client:
            return await client.measure_link()
    except NodeError:
        return None


def no_answer(candidate: Candidate, detail: str) -> Probe:
    """Describe a candidate that did not answer."""
    return _found(candidate, Finding.NO_ANSWER, detail)


async def _ask(client: NodeClient, candidate: Candidate) -> Probe:
    # Every text of a peer may end on a terminal.
    record = _printable(NodeRecord, await client.node())
    health = _printable(Health, await client.health())
    return Probe(
        candidate=candidate,
        finding=Finding.NODE,
        health=health,
        record=record,
        link=LinkSpeed(rtt_ms=await client.measure_rtt(), bytes_per_second=None),
    )


async def _stranger(candidate: Candidate, finding: Finding, detail: str) -> Probe:
    """Say what is there that does not let this machine in: what anybody may ask it."""
    try:
        async with (
            asyncio.timeout(PROBE_SECONDS),
            httpx.AsyncClient(
                timeout=PROBE_SECONDS,
                trust_env=False,
                follow_redirects=False,
                headers={"Accept-Encoding": "identity"},
                verify=tls_context(),
            ) as http,
            http.stream("GET", f"{candidate.url}/v1/health") as response,
        ):
            body = await read_bounded(response, _MAX_HEALTH_BYTES)
            status = response.status_code
    except AnswerTooLongError:
        return _found(candidate, Finding.NOT_A_NODE, "its answer is longer than any node's")
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        if finding is Finding.WRONG_TOKEN:
            return _found(candidate, finding, detail)
        is_late = isinstance(error, TimeoutError | httpx.TimeoutException)
        why = f"no answer within {PROBE_SECONDS:g} s" if is_late else in_words(error)
        return no_answer(candidate, why)
    if status in PROXY_STATUSES:
        return no_answer(candidate, f"a proxy on the way answers with HTTP status {status}")
    health = None
    if status == httpx.codes.OK:
        try:
            health = _printable(Health, Health.model_validate_json(body))
        except ValidationError:
            health = None
    if health is None or health.service != _SERVICE:
        more = "" if status == httpx.codes.OK else f" (HTTP status {status})"
        return _found(candidate, Finding.NOT_A_NODE, f"{_UNFIT}{more}")
    if finding is Finding.NO_ANSWER:
        version = printable(health.agent_version, 40)
        detail = f"it runs linkcpp {version}, but no link to it comes about: {detail}"
    return _found(candidate, finding, detail, health)


def _found(
    candidate: Candidate, finding: Finding, detail: str, health: Health | None = None
) -> Probe:
    return Probe(candidate=candidate, finding=finding, detail=detail, health=health)


def _printable(kind: type[_R], told: _R) -> _R:
    return kind.model_validate(printable_json(told.model_dump(mode="json")))
