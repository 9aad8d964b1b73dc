"""The client of a hub, as a joined machine or a coordinator uses it."""

import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from linkcpp.cluster.identity import Identity, load_identity
from linkcpp.cluster.records import NodeId
from linkcpp.common.errors import LinkcppError
from linkcpp.common.proxies import naming, proxy_from_here
from linkcpp.common.records import ErrorBody
from linkcpp.common.request_ids import request_id_headers
from linkcpp.common.text import printable
from linkcpp.registry.connection import HubConnection, HubError, Renew
from linkcpp.registry.credentials import HubCredentials, load_credentials, save_credentials
from linkcpp.registry.edges import (
    HUB_EVENT,
    EdgeEvent,
    EdgeList,
    EdgeOffer,
    EdgeRequest,
    GatewayHeartbeat,
    GatewayHeartbeatAnswer,
    GatewayList,
    HubEvent,
    OfferRequest,
)
from linkcpp.registry.encoding import nonce
from linkcpp.registry.keys import MachineKeys, load_keys
from linkcpp.registry.models import ServedModelList
from linkcpp.registry.proofs import join_request, renew_request
from linkcpp.registry.records import (
    Heartbeat,
    HeartbeatAnswer,
    HubHealth,
    JoinAnswer,
    JoinTokenList,
    JoinTokenRequest,
    NewJoinToken,
    NodeList,
    NodeToken,
    RegisteredNode,
    Role,
)
from linkcpp.registry.relay import RELAY_PATH
from linkcpp.registry.trust import may_be_direct, may_relay, websocket_url

_log = logging.getLogger(__name__)

_PING_INTERVAL_SECONDS = 20.0
_PING_TIMEOUT_SECONDS = 20.0
_MAX_EVENT_BYTES = 64 * 1024


class HubClient(HubConnection):
    """Typed calls to one hub; all raise ``HubError``.

    Whatever addresses it names, only those are passed on that may be dialled.
    """

    async def heartbeat(self, body: Heartbeat) -> HeartbeatAnswer:
        """Tell that this node is alive."""
        answer = await self.call(HeartbeatAnswer, "POST", "/v1/heartbeat", body)
        offers = tuple(self._with_addresses(offer) for offer in answer.offers)
        return answer.model_copy(update={"offers": offers})

    async def leave(self) -> None:
        """Tell that this node stops."""
        await self.exchange("POST", "/v1/leave")

    async def nodes(self, *, ask: bool = False) -> NodeList:
        """List all machines that joined; ``ask`` has the hub ask nodes whether they are there."""
        return await self.call(NodeList, "GET", f"/v1/nodes{'?ask=true' if ask else ''}")

    async def node(self, node_id: str) -> RegisteredNode:
        """Look at one machine."""
        return await self.call(RegisteredNode, "GET", f"/v1/nodes/{quote(node_id, safe='')}")

    async def revoke_node(self, node_id: str) -> str | None:
        """Cut a machine off; it may join again with a new join token.

        Returns what the hub remarks where it could not write that yet.
        """
        return await self._take_away(f"/v1/nodes/{quote(node_id, safe='')}")

    async def create_edge(self, body: EdgeRequest) -> EdgeOffer:
        """Ask for an edge to a node."""
        return self._with_addresses(await self.call(EdgeOffer, "POST", "/v1/edges", body))

    async def renew_offer(self, edge_id: str, body: OfferRequest) -> EdgeOffer:
        """Ask for another way for an edge that exists."""
        path = f"/v1/edges/{edge_id}/offer"
        return self._with_addresses(await self.call(EdgeOffer, "POST", path, body))

    async def close_edge(self, edge_id: str) -> None:
        """End an edge; fine when it is closed already."""
        await self.exchange("DELETE", f"/v1/edges/{edge_id}")

    async def edges(self) -> EdgeList:
        """List the open edges."""
        return await self.call(EdgeList, "GET", "/v1/edges")

    async def gateways(self) -> GatewayList:
        """List the gateways; one without an address is not as protected as the hub is."""
        told = await self.call(GatewayList, "GET", "/v1/gateways")
        own_url = websocket_url(self.url, RELAY_PATH)
        listed = (
            gateway.model_copy(update={"url": self._relay_url(gateway.url or own_url)})
            for gateway in told.gateways
        )
        return GatewayList(gateways=tuple(listed))

    async def gateway_heartbeat(self, body: GatewayHeartbeat) -> GatewayHeartbeatAnswer:
        """Tell that this gateway is alive, and which edges it has."""
        return await self.call(GatewayHeartbeatAnswer, "POST", "/v1/gateways/heartbeat", body)

    async def models(self) -> ServedModelList:
        """List the models whose weights the hub gives."""
        return await self.call(ServedModelList, "GET", "/v1/models")

    async def create_join_token(self, body: JoinTokenRequest) -> NewJoinToken:
        """Make a join token."""
        return await self.call(NewJoinToken, "POST", "/v1/join-tokens", body)

    async def join_tokens(self) -> JoinTokenList:
        """List the join tokens."""
        return await self.call(JoinTokenList, "GET", "/v1/join-tokens")

    async def revoke_join_token(self, token_id: str) -> str | None:
        """Make a join token useless; returns a remark as ``revoke_node`` does."""
        return await self._take_away(f"/v1/join-tokens/{quote(token_id, safe='')}")

    async def _take_away(self, path: str) -> str | None:
        content = await self.exchange("DELETE", path)
        if not content:
            return None
        told = self.service.parse(ErrorBody, content)
        return printable(" ".join(filter(None, (told.message, told.hint))), 500)

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[HubEvent]]:
        """Listen to what the hub pushes; the iterator ends when the connection does."""
        token = await self.token()
        url = websocket_url(self.url, "/v1/events")
        proxy = proxy_from_here(url)
        try:
            with naming(proxy):
                connection = await connect(
                    url,
                    additional_headers={"Authorization": f"Bearer {token}", **request_id_headers()},
                    ping_interval=_PING_INTERVAL_SECONDS,
                    ping_timeout=_PING_TIMEOUT_SECONDS,
                    max_size=_MAX_EVENT_BYTES,
                    **self.dial_options(proxy),
                )
        except InvalidStatus as error:
            raise self.refusal(
                error.response.status_code, bytes(error.response.body or b"")
            ) from None
        except (OSError, WebSocketException, ValueError) as error:
            raise self.service.unreachable(error) from error
        try:
            yield self._read_events(connection)
        finally:
            await connection.close()

    async def _read_events(self, connection: ClientConnection) -> AsyncIterator[HubEvent]:
        with contextlib.suppress(ConnectionClosed):
            async for message in connection:
                try:
                    event = HUB_EVENT.validate_json(message)
                except ValidationError:
                    continue  # of a newer hub
                if isinstance(event, EdgeEvent):
                    event = EdgeEvent(offer=self._with_addresses(event.offer))
                yield event

    def _with_addresses(self, offer: EdgeOffer) -> EdgeOffer:
        """Add the address of the hub's own gateway, and leave out what may not be dialled."""
        relay_url = offer.relay_url
        if relay_url is None and offer.gateway_id == offer.hub_id:
            relay_url = websocket_url(self.url, RELAY_PATH)
        direct_urls = tuple(url for url in offer.direct_urls if may_be_direct(url))
        return offer.model_copy(
            update={"relay_url": self._relay_url(relay_url), "direct_urls": direct_urls}
        )

    def _relay_url(self, url: str | None) -> str | None:
        if url is None or may_relay(url, self.url):
            return url
        _log.warning(
            "%s names a gateway at %s, without the TLS that it has itself: not dialled",
            self.url,
            printable(url, 200),
        )
        return None


def joined_client(
    url: str, *, identity: Identity | None = None, keys: MachineKeys | None = None
) -> HubClient:
    """Make the client of a hub that this machine joined.

    Raises:
        LinkcppError: it did not join that hub, or its keys or credentials cannot be used.
    """
    credentials = load_credentials(url)
    identity = identity or load_identity()
    renew = machine_renewal(credentials, identity.node_id, keys or load_keys())
    # How the address may look was decided when it joined.
    return HubClient(credentials.url, renew=renew, hub_id=credentials.hub_id, allow_plain=True)


def machine_renewal(credentials: HubCredentials, node_id: NodeId, keys: MachineKeys) -> Renew:
    """Return what renews a machine's token by a proof of its key, and keeps the new one."""

    async def renew(connection: HubConnection, health: HubHealth) -> NodeToken:
        check_same_hub(credentials, health)
        body = renew_request(
            keys.signing,
            hub_id=credentials.hub_id,
            node_id=node_id,
            time=health.time,
            nonce=nonce(),
        )
        token = await connection.call(NodeToken, "POST", "/v1/tokens", body, authenticated=False)
        save_credentials(credentials.model_copy(update={"node_token": token}))
        return token

    return renew


def check_same_hub(credentials: HubCredentials, health: HubHealth) -> None:
    """See that a hub is the one that was joined.

    Raises:
        HubError: another hub answers at this address.
    """
    known = (credentials.hub_id, credentials.hub_public_key)
    if (health.hub_id, health.public_key) != known:
        raise HubError(
            f"Another hub than the one that was joined answers at {credentials.url}.",
            hint="If it was set up anew, join it with a new token; else somebody is in between.",
            code="other_hub",
        )


async def join_hub(
    url: str,
    join_token: str,
    *,
    identity: Identity,
    keys: MachineKeys,
    roles: tuple[Role, ...] = (),
    allow_plain: bool = False,
) -> HubCredentials:
    """Exchange a join token for credentials, and keep them.

    A token that is for none of ``roles`` is refused, and keeps its use.

    Raises:
        LinkcppError: the hub cannot be reached, does not take the token, or is another one than
            before at this address.
    """
    async with HubClient(url, allow_plain=allow_plain) as client:
        health = await client.health()
        try:
            body = join_request(
                keys.signing,
                hub_id=health.hub_id,
                token=join_token.strip(),
                node_id=identity.node_id,
                name=identity.name,
                signing_key=keys.signing_public,
                edge_key=keys.edge_public,
                time=health.time,
                nonce=nonce(),
            ).model_copy(update={"roles": roles})
        except ValidationError:
            raise LinkcppError(
                "That is not a join token: it is one line that begins with lcj_.",
                hint="`linkcpp hub token create` makes one on the hub.",
            ) from None
        answer = await client.call(JoinAnswer, "POST", "/v1/join", body, authenticated=False)
        credentials = HubCredentials(
            url=client.url,
            name=identity.name,
            hub_id=answer.hub_id,
            hub_public_key=answer.hub_public_key,
            node_token=answer.node_token,
        )
        check_same_hub(credentials, health)
    save_credentials(credentials)
    return credentials
