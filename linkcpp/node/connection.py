"""Calls to a node agent over a link: bounds on what a peer costs, errors in words."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from linkcpp.cluster.records import Health, NodeId
from linkcpp.common.closing import AsyncClosing
from linkcpp.common.http_client import RemoteService, ServiceError, read_bounded
from linkcpp.common.request_ids import request_id_headers
from linkcpp.common.text import printable
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.http import link_transport
from linkcpp.node.records import API_TARGET

_MAX_ANSWER_BYTES = 16 * 2**20
_BASE = "http://node"
_HINT_REACH = "See that its agent runs there, and that no firewall blocks its port."


class NodeError(ServiceError):
    """A call to a node agent failed."""


class NodeUnreachableError(NodeError):
    """The agent did not answer, or what answered is not a node agent."""


class WrongTokenError(NodeError):
    """The node and this machine do not have the same token."""


class NodeRefusedError(NodeError):
    """The agent answered with a reason why not (too little memory, no such server, …)."""


class OtherNodeError(NodeError):
    """What answers says that it is another machine than the one that is proved to be there."""


class NodeConnection(AsyncClosing):
    """Calls to one node, for use as an asynchronous context manager.

    ``url`` is what the node is called. The link has proved which node is at its other end; an
    answer in which that one calls itself another is refused. With ``owns_link`` the link is closed
    with the client.
    """

    def __init__(
        self,
        url: str,
        link: LinkEndpoint,
        *,
        timeout_seconds: float = 10.0,
        owns_link: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self.link = link
        self._owns_link = owns_link
        self._node = RemoteService("node", self.url, _HINT_REACH, NodeUnreachableError)
        self._timeout_seconds = timeout_seconds
        self._http = httpx.AsyncClient(
            transport=link_transport(link, API_TARGET),
            timeout=timeout_seconds,
            trust_env=False,
            follow_redirects=False,
            headers={"Accept-Encoding": "identity"},
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()
        if self._owns_link:
            await self.link.aclose()

    async def health(self) -> Health:
        """Ask who is there.

        Raises:
            NodeUnreachableError: nothing answers, or it is not a node agent.
            OtherNodeError: it is not the node that the link leads to.
        """
        health = self._node.parse(Health, await self._call("GET", "/v1/health"))
        self._hold_to(health.node_id)
        return health

    def _hold_to(self, told: NodeId) -> None:
        """See that a node's own words name the node that has proved itself.

        Raises:
            OtherNodeError: they name another one.
        """
        proved = self.link.peer.node_id
        if told != proved:
            raise OtherNodeError(
                f"The node at {self.url} says that it is {printable(told, 64)}, but it has proved "
                f"to be {printable(proved, 64)}.",
                hint="Find out what runs there: a node can only be used as itself.",
                code="other_node",
            )

    async def _call(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        content_type: str = "application/json",
        timeout_seconds: float | None = None,
    ) -> bytes:
        headers = request_id_headers()
        if content is not None:
            headers["Content-Type"] = content_type
        request = self._http.build_request(
            method,
            _BASE + path,
            content=content,
            headers=headers,
            timeout=timeout_seconds or self._timeout_seconds,
        )
        async with self._exchange(request) as response:
            body = await read_bounded(response, _MAX_ANSWER_BYTES)
        if not response.is_success:
            told = self._node.told(response.status_code, body)
            message = f"{self.url}: {told.message}"
            raise NodeRefusedError(message, hint=told.hint, code=told.code, told=told.message)
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
