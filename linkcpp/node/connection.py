"""Calls to a node agent: proof before trust, bounds on what a peer costs, errors in words."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from linkcpp.cluster.config import node_url
from linkcpp.cluster.records import Health, NodeId
from linkcpp.cluster.token import canonical_address, make_challenge, verify_health_proof
from linkcpp.common.closing import AsyncClosing
from linkcpp.common.http_client import RemoteService, ServiceError, read_bounded
from linkcpp.common.request_ids import request_id_headers
from linkcpp.common.sockets import tune_transport
from linkcpp.common.text import printable
from linkcpp.node.records import BRIDGE_MAX_MESSAGE_BYTES

PING_INTERVAL_SECONDS = 5.0
PING_TIMEOUT_SECONDS = 30.0

_MAX_ANSWER_BYTES = 16 * 2**20
_WRITE_LIMIT_BYTES = 512 * 1024
_HINT_REACH = "See that `linkcpp node` runs there and that no firewall blocks its port."
_HINT_TOKEN = (
    "Give both machines one token: `linkcpp token --show | ssh OTHER linkcpp token set`, "  # noqa: S105
    "then restart `linkcpp node` there."
)


class NodeError(ServiceError):
    """A call to a node agent failed."""


class NodeUnreachableError(NodeError):
    """The agent did not answer, or what answered is no node agent."""


class WrongTokenError(NodeError):
    """The node and this machine do not have the same token."""


class NodeRefusedError(NodeError):
    """The agent answered with a reason why not (too little memory, no such server, …)."""


class OtherNodeError(NodeError):
    """What answers says that it is another machine than the one that is proved to be there."""


class EdgePort(NamedTuple):
    """A port of this machine's loopback at which the edge to one node begins."""

    number: int
    node_id: NodeId


class NodeConnection(AsyncClosing):
    """Authenticated calls to one node, for use as an asynchronous context manager.

    The token goes out only after the host has proved that it knows it too (``health``), which the
    first call sees to; all later connections go to the very address that gave the proof.

    Behind the port of an ``edge`` there can be nobody but its node, whom the edge itself has
    proved; ``url`` is then what the node is called, and ``way`` tells how the edge gets there.

    Whichever of the two proved it: an answer in which the node calls itself another one is refused.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_seconds: float = 10.0,
        edge: EdgePort | None = None,
        way: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._node = RemoteService("node", self.url, _HINT_REACH, NodeUnreachableError)
        self._timeout_seconds = timeout_seconds
        self.way = way
        self._is_proven = edge is not None
        self._node_id = edge.node_id if edge else None
        self._base = node_url("127.0.0.1", edge.number) if edge else self.url
        self._is_trusted = self._is_proven
        self._trusting = asyncio.Lock()
        # Neither proxies nor credentials from the environment: the token is for this host alone.
        self._http = httpx.AsyncClient(
            timeout=timeout_seconds,
            trust_env=False,
            follow_redirects=False,
            headers={"Accept-Encoding": "identity"},
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def health(self) -> Health:
        """Ask who is there, and have it prove that it knows the token.

        Raises:
            NodeUnreachableError: nothing answers, or it is no node agent.
            OtherNodeError: it is not the node that it was, or that the edge leads to.
            WrongTokenError: it knows another token, or passes on somebody else's proof.
        """
        challenge = make_challenge()
        request = self._http.build_request(
            "GET",
            f"{self._base if self._is_proven else self.url}/v1/health",
            params={} if self._is_proven else {"challenge": challenge},
            headers=request_id_headers(),
        )
        async with self._exchange(request) as response:
            # Before the body: a host that closes after its answer has no address any more.
            peer = response.extensions["network_stream"].get_extra_info("server_addr")
            body = await read_bounded(response, _MAX_ANSWER_BYTES)
        if peer is None:
            raise self._node.unreachable(ConnectionError("it closed the connection at once"))
        if response.status_code != httpx.codes.OK:
            raise self._refusal(response.status_code, body)
        health = self._node.parse(Health, body)
        if not self._is_proven:
            self._verify(health, challenge, canonical_address(peer[0], peer[1]))
        self._hold_to(health.node_id)
        if not self._is_proven and urlsplit(self.url).scheme == "http":
            self._base = node_url(peer[0], peer[1]) + urlsplit(self.url).path
        self._is_trusted = True
        return health

    def _hold_to(self, told: NodeId) -> None:
        """See that a node's own words name the node that has proved itself.

        Raises:
            OtherNodeError: they name another one.
        """
        if self._node_id is None:
            self._node_id = told
        if told != self._node_id:
            raise OtherNodeError(
                f"The node at {self.url} says that it is {printable(told, 64)}, but it has proved "
                f"to be {self._node_id}.",
                hint="Find out what runs there: a node can only be used as itself.",
                code="other_node",
            )

    def _verify(self, health: Health, challenge: str, peer_address: str) -> None:
        address, proof = health.address or "", health.proof or ""
        if not verify_health_proof(
            self._token, proof, challenge=challenge, node_id=health.node_id, address=address
        ):
            raise WrongTokenError(
                f"The node {printable(health.name)} at {self.url} has another cluster token.",
                hint=_HINT_TOKEN,
                code="wrong_token",
            )
        # Over TLS the certificate tells who is there; a proxy in front has an address of its own.
        if urlsplit(self.url).scheme == "http" and address != peer_address:
            raise WrongTokenError(
                f"{self.url} answers with the proof of a node at {printable(address)}, as somebody "
                "in between would.",
                hint="Name the node by the address that it has itself; behind an address "
                "translation, use https or a tunnel (ssh -L).",
                code="address_differs",
            )

    async def _open_websocket(self, path: str) -> ClientConnection:
        await self._ensure_trusted()
        parts = urlsplit(self._base)
        scheme = "wss" if parts.scheme == "https" else "ws"
        try:
            connection = await connect(
                urlunsplit((scheme, parts.netloc, parts.path + path, "", "")),
                additional_headers=self._headers(),
                compression=None,
                proxy=None,
                open_timeout=self._timeout_seconds,
                ping_interval=PING_INTERVAL_SECONDS,
                ping_timeout=PING_TIMEOUT_SECONDS,
                close_timeout=2.0,
                max_size=BRIDGE_MAX_MESSAGE_BYTES,
                write_limit=_WRITE_LIMIT_BYTES,
            )
        except InvalidStatus as error:
            body = bytes(error.response.body or b"")
            raise self._refusal(error.response.status_code, body) from None
        except (OSError, WebSocketException, ValueError) as error:
            raise self._node.unreachable(error) from error
        tune_transport(connection.transport)
        return connection

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}", **request_id_headers()}

    async def _ensure_trusted(self) -> None:
        async with self._trusting:
            if not self._is_trusted:
                await self.health()

    async def _call(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        content_type: str = "application/json",
        timeout_seconds: float | None = None,
    ) -> bytes:
        await self._ensure_trusted()
        headers = self._headers()
        if content is not None:
            headers["Content-Type"] = content_type
        request = self._http.build_request(
            method,
            self._base + path,
            content=content,
            headers=headers,
            timeout=timeout_seconds or self._timeout_seconds,
        )
        async with self._exchange(request) as response:
            body = await read_bounded(response, _MAX_ANSWER_BYTES)
        if not response.is_success:
            raise self._refusal(response.status_code, body)
        return body

    @asynccontextmanager
    async def _exchange(self, request: httpx.Request) -> AsyncIterator[httpx.Response]:
        # httpx bounds each read; a peer that drips bytes is bounded here as a whole.
        limit = 2 * max(value or 0.0 for value in request.extensions["timeout"].values())
        try:
            async with asyncio.timeout(limit):
                response = await self._http.send(request, stream=True)
                try:
                    yield response
                finally:
                    await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            raise self._node.unreachable(error) from error

    def _refusal(self, status: int, body: bytes) -> NodeError:
        told = self._node.told(status, body)
        if status == httpx.codes.UNAUTHORIZED:
            return WrongTokenError(
                f"The node at {self.url} does not take this machine's token.",
                hint=_HINT_TOKEN,
                code=told.code,
            )
        message = f"{self.url}: {told.message}"
        return NodeRefusedError(message, hint=told.hint, code=told.code, told=told.message)
