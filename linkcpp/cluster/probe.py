"""Ask one address who is there: proof first, then the token, then what the node has.

The token goes only to a host that has proved that it knows it, and only to the address that gave
the proof. A peer that lies, drips or stalls costs its own deadline and nothing else.
"""

import asyncio
import contextlib
import functools
import math
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from linkcpp.cluster.addresses import host_of
from linkcpp.cluster.candidates import Candidate, Finding, Probe
from linkcpp.cluster.config import node_url
from linkcpp.cluster.records import Health, LinkSpeed, NodeRecord
from linkcpp.cluster.token import canonical_address, make_challenge, verify_health_proof
from linkcpp.common.http_client import PROXY_STATUSES
from linkcpp.common.network_errors import in_words
from linkcpp.common.records import WireRecord
from linkcpp.common.request_ids import request_id_headers
from linkcpp.common.text import printable, printable_json

# A node that computes with all its cores answers late.
PROBE_SECONDS = 3.0
LINK_SECONDS = 1.5

_SERVICE = "linkcpp-node"
_MAX_HEALTH_BYTES = 16 * 2**10
_MAX_NODE_BYTES = 256 * 2**10
_MAX_ECHO_BYTES = 4096
_RTT_CALLS = 8
_ECHO_BYTES = (2**18, 2**20, 2**22)
_ECHO_LONG_ENOUGH_SECONDS = 0.05

_R = TypeVar("_R", bound=WireRecord)


class _StopError(Exception):
    """The probe is over: it found something other than a node."""

    def __init__(self, finding: Finding, detail: str, health: Health | None = None) -> None:
        super().__init__(detail)
        self.finding = finding
        self.detail = detail
        self.health = health


class _Answer(NamedTuple):
    status: int
    body: bytes
    peer_host: str
    peer_port: int


async def probe_node(
    candidate: Candidate, token: str, *, deadline_seconds: float = PROBE_SECONDS
) -> Probe:
    """Find out what is at an address; never raises for anything that a peer does.

    A node's round trip is measured on the way; ``measure_link`` adds the throughput.
    """
    async with http_client() as http:
        try:
            async with asyncio.timeout(deadline_seconds):
                base, health = await _prove(http, candidate.url, token)
                record = await _ask(http, base, token, health)
                rtt_ms = await _measure_rtt(http, base)
        except _StopError as stop:
            return Probe(
                candidate=candidate, finding=stop.finding, detail=stop.detail, health=stop.health
            )
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return no_answer(candidate, _explain(error, deadline_seconds))
    return Probe(
        candidate=candidate,
        finding=Finding.NODE,
        health=health,
        record=record,
        base_url=base,
        link=LinkSpeed(rtt_ms=rtt_ms, bytes_per_second=None),
    )


def no_answer(candidate: Candidate, detail: str) -> Probe:
    """Describe a candidate that did not answer."""
    return Probe(candidate=candidate, finding=Finding.NO_ANSWER, detail=detail)


async def measure_link(
    http: httpx.AsyncClient, url: str, token: str, *, deadline_seconds: float = LINK_SECONDS
) -> LinkSpeed | None:
    """Measure the round trip and the throughput to a node that has proved itself at ``url``.

    Returns ``None`` where not even one call comes back in time. The round trip is the best of
    several over one kept connection, the throughput that of the largest echo that was sent: sizes
    grow until one takes long enough to tell. Measure one node at a time: several would divide the
    coordinator's own link between them.
    """
    rtt_ms: float | None = None
    rate: float | None = None
    # A slow or lossy link, or a peer that stalls: what was measured until then counts.
    with contextlib.suppress(httpx.HTTPError, OSError, _StopError):
        async with asyncio.timeout(deadline_seconds):
            rtt_ms = await _measure_rtt(http, url)
            for size in _ECHO_BYTES:
                start = time.perf_counter()
                answer = await _call(
                    http,
                    "POST",
                    f"{url}/v1/echo",
                    _MAX_ECHO_BYTES,
                    token=token,
                    content=bytes(size),
                )
                took = time.perf_counter() - start
                if answer.status != httpx.codes.OK:
                    break
                rate = size / max(took - rtt_ms / 1000, 1e-6)
                if took > _ECHO_LONG_ENOUGH_SECONDS:
                    break
    return None if rtt_ms is None else LinkSpeed(rtt_ms=rtt_ms, bytes_per_second=rate)


async def _measure_rtt(http: httpx.AsyncClient, url: str) -> float:
    """Return the shortest round trip of several calls, in milliseconds."""
    best = math.inf
    for _ in range(_RTT_CALLS):
        start = time.perf_counter()
        await _call(http, "GET", f"{url}/v1/health", _MAX_HEALTH_BYTES)
        best = min(best, time.perf_counter() - start)
    return best * 1000


async def _prove(http: httpx.AsyncClient, url: str, token: str) -> tuple[str, Health]:
    """Have the host prove itself; return the URL of the very address that did, and who it is."""
    challenge = make_challenge()
    answer = await _call(
        http, "GET", f"{url}/v1/health", _MAX_HEALTH_BYTES, query={"challenge": challenge}
    )
    health = _read(Health, answer)
    if health.service != _SERVICE:
        raise _not_a_node()
    address = health.address or ""
    is_known = verify_health_proof(
        token, health.proof or "", challenge=challenge, node_id=health.node_id, address=address
    )
    if not is_known:
        raise _StopError(Finding.WRONG_TOKEN, "it has another cluster token", health)
    parts = urlsplit(url)
    if parts.scheme == "https":
        # The certificate tells who is there; a proxy in front has an address of its own.
        return url, health
    if address != canonical_address(answer.peer_host, answer.peer_port):
        raise _StopError(
            Finding.UNPROVEN,
            f"it passes on the proof of a node at {printable(address)}, as somebody in between "
            "would (or an address translation does)",
            health,
        )
    return node_url(answer.peer_host, answer.peer_port) + parts.path, health


async def _ask(http: httpx.AsyncClient, base: str, token: str, health: Health) -> NodeRecord:
    answer = await _call(http, "GET", f"{base}/v1/node", _MAX_NODE_BYTES, token=token)
    if answer.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise _StopError(Finding.WRONG_TOKEN, "it does not take this machine's token", health)
    record = _read(NodeRecord, answer)
    if record.node_id != health.node_id:
        raise _StopError(Finding.NOT_A_NODE, "it gives two different node ids", health)
    return record


def _read(kind: type[_R], answer: _Answer) -> _R:
    if answer.status in PROXY_STATUSES:
        detail = f"a proxy on the way answers with HTTP status {answer.status}"
        raise _StopError(Finding.NO_ANSWER, detail)
    if answer.status != httpx.codes.OK:
        raise _not_a_node(f" (HTTP status {answer.status})")
    try:
        told = kind.model_validate_json(answer.body)
        # Every text of a peer may end on a terminal.
        return kind.model_validate(printable_json(told.model_dump(mode="json")))
    except ValidationError:
        raise _not_a_node() from None


def _not_a_node(more: str = "") -> _StopError:
    return _StopError(
        Finding.NOT_A_NODE, f"what answers is not a linkcpp node of a version that fits{more}"
    )


async def _call(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    longest_bytes: int,
    *,
    token: str | None = None,
    query: dict[str, str] | None = None,
    content: bytes | None = None,
) -> _Answer:
    headers = request_id_headers()
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = http.build_request(method, url, params=query, headers=headers, content=content)
    async with _sent(http, request) as response:
        # Read before the body: a socket that the peer has closed forgets whose it was.
        peer = response.extensions["network_stream"].get_extra_info("server_addr")
        if peer is None:
            raise httpx.RemoteProtocolError("closed before the answer was read")
        body = bytearray()
        # Raw: a compressed answer could unfold to any size.
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > longest_bytes:
                raise _StopError(Finding.NOT_A_NODE, "its answer is longer than any node's")
        return _Answer(response.status_code, bytes(body), host_of(peer), int(peer[1]))


@contextlib.asynccontextmanager
async def _sent(http: httpx.AsyncClient, request: httpx.Request) -> AsyncIterator[httpx.Response]:
    response = await http.send(request, stream=True)
    try:
        yield response
    finally:
        await response.aclose()


def http_client() -> httpx.AsyncClient:
    """Make a client for one node: the token that it carries goes to that host and nowhere else."""
    # So no proxies or credentials of the environment, and no redirects.
    return httpx.AsyncClient(
        timeout=PROBE_SECONDS,
        trust_env=False,
        follow_redirects=False,
        headers={"Accept-Encoding": "identity"},
        verify=_tls(),
    )


@functools.cache
def _tls() -> ssl.SSLContext:
    """Load the trusted certificates once: it takes longer than a probe."""
    return ssl.create_default_context()


def _explain(error: Any, deadline_seconds: float) -> str:
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return f"no answer within {deadline_seconds:g} s"
    return in_words(error)
