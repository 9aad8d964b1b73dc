"""The calls of the hub's API, by what they are about; those about weights are with the weights."""

from collections import deque
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import FastAPI, Path
from fastapi.responses import Response, StreamingResponse

from linkcpp import __version__
from linkcpp.hub.errors import NOT_WRITTEN_YET, taken_away
from linkcpp.hub.join_tokens import create_join_token, list_join_tokens
from linkcpp.hub.machines import node_json, nodes_json
from linkcpp.hub.roles import HEALTH_PATH, Caller, allow
from linkcpp.hub.service import Hub
from linkcpp.registry.edges import (
    EdgeList,
    EdgeOffer,
    EdgeRequest,
    GatewayHeartbeat,
    GatewayHeartbeatAnswer,
    GatewayList,
    OfferRequest,
)
from linkcpp.registry.fields import UUID_PATTERN
from linkcpp.registry.records import (
    HubHealth,
    JoinAnswer,
    JoinRequest,
    JoinTokenList,
    JoinTokenRequest,
    NewJoinToken,
    NodeList,
    NodeToken,
    RegisteredNode,
    RenewRequest,
    Role,
)

_NodeId = Annotated[str, Path(pattern=UUID_PATTERN, description="The machine's id")]
_EdgeId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="The edge's id")]
_TokenId = Annotated[str, Path(pattern=UUID_PATTERN, description="The token's id, not its secret")]
_JSON = "application/json"


def add_machine_routes(app: FastAPI, hub: Hub) -> None:
    """Add the calls about machines: health, joining, new tokens, lists, revocation."""
    _add_joining(app, hub)

    @app.get(
        "/v1/nodes",
        tags=["machines"],
        summary="All machines that joined; nodes are asked first whether they are there, if wanted",
        response_model=NodeList,
        dependencies=[allow(Role.BACKBONE, Role.ADMIN)],
    )
    async def list_nodes(ask: bool = False) -> Response:
        silent_ids: frozenset[str] = frozenset()
        if ask:
            silent_ids = await hub.presence_probe.silent(hub.directory.nodes_online(hub.clock()))
        revoked_ids = hub.directory.revoked_ids()
        pieces = await hub.read(
            lambda engine: nodes_json(engine, hub.clock(), revoked_ids, silent_ids)
        )
        length = {"Content-Length": str(sum(map(len, pieces)))}
        return StreamingResponse(_taken_from(pieces), headers=length, media_type=_JSON)

    @app.get(
        "/v1/nodes/{node_id}",
        tags=["machines"],
        summary="One machine",
        response_model=RegisteredNode,
        dependencies=[allow(Role.BACKBONE, Role.ADMIN)],
    )
    async def show_node(node_id: _NodeId) -> Response:
        revoked_ids = hub.directory.revoked_ids()
        content = await hub.read(
            lambda engine: node_json(engine, node_id, hub.clock(), revoked_ids)
        )
        return Response(content, media_type=_JSON)

    @app.post(
        "/v1/leave",
        status_code=204,
        tags=["machines"],
        summary="Tell that this node stops; its next heartbeat brings it back",
    )
    async def leave(caller: Annotated[Caller, allow(Role.NODE)]) -> Response:
        await hub.registrar.leave(caller.node_id)
        return Response(status_code=204)

    @app.delete(
        "/v1/nodes/{node_id}",
        status_code=204,
        tags=["machines"],
        summary="Revoke a machine: its tokens, events, edges and downloads end",
        responses=NOT_WRITTEN_YET,
        dependencies=[allow(Role.ADMIN)],
    )
    async def revoke_node(node_id: _NodeId) -> Response:
        return taken_away(await hub.revoke(node_id))


async def _taken_from(pieces: deque[bytes]) -> AsyncIterator[bytes]:
    """Give the pieces one by one, each as soon as the caller took the one before."""
    while pieces:
        yield pieces.popleft()


def _add_joining(app: FastAPI, hub: Hub) -> None:
    @app.get(HEALTH_PATH, tags=["hub"], summary="Who this hub is; needs no token")
    async def health() -> HubHealth:
        return HubHealth.model_validate(
            {
                "version": __version__,
                "hub_id": hub.identity.hub_id,
                "public_key": hub.identity.public_key,
                "time": hub.registrar.told_time(),
            }
        )

    @app.post("/v1/join", tags=["machines"], summary="Exchange a join token; needs no other")
    async def join(request: JoinRequest) -> JoinAnswer:
        return await hub.registrar.join(request)

    @app.post("/v1/tokens", tags=["machines"], summary="Exchange a proof for a new token")
    async def renew(request: RenewRequest) -> NodeToken:
        return hub.registrar.renew(request)


def add_edge_routes(app: FastAPI, hub: Hub) -> None:
    """Add the calls about edges and gateways."""

    @app.post("/v1/edges", status_code=201, tags=["edges"], summary="Ask for an edge to a node")
    async def create(
        request: EdgeRequest, caller: Annotated[Caller, allow(Role.BACKBONE)]
    ) -> EdgeOffer:
        return await hub.edges.create(caller.node_id, request)

    @app.get(
        "/v1/edges",
        tags=["edges"],
        summary="All open edges",
        dependencies=[allow(Role.ADMIN)],
    )
    async def list_edges() -> EdgeList:
        return hub.edges.records()

    @app.post("/v1/edges/{edge_id}/offer", tags=["edges"], summary="Another way for an edge")
    async def renew(
        edge_id: _EdgeId, request: OfferRequest, caller: Annotated[Caller, allow(Role.BACKBONE)]
    ) -> EdgeOffer:
        return await hub.edges.renew(caller.node_id, edge_id, request)

    @app.delete(
        "/v1/edges/{edge_id}",
        status_code=204,
        tags=["edges"],
        summary="End an edge; also fine when it is closed",
        responses=NOT_WRITTEN_YET,
    )
    async def close(
        edge_id: _EdgeId, caller: Annotated[Caller, allow(Role.BACKBONE, Role.ADMIN)]
    ) -> Response:
        is_admin = caller.role is Role.ADMIN
        return taken_away(await hub.edges.close(caller.node_id, edge_id, is_admin=is_admin))

    @app.get(
        "/v1/gateways",
        tags=["gateways"],
        summary="All gateways",
        dependencies=[allow(Role.NODE, Role.BACKBONE, Role.ADMIN)],
    )
    async def gateways() -> GatewayList:
        return hub.registrar.gateways()

    @app.post(
        "/v1/gateways/heartbeat", tags=["gateways"], summary="Tell that this gateway is alive"
    )
    async def heartbeat(
        body: GatewayHeartbeat, caller: Annotated[Caller, allow(Role.GATEWAY)]
    ) -> GatewayHeartbeatAnswer:
        return await hub.registrar.gateway_heartbeat(caller.node_id, body)


def add_token_routes(app: FastAPI, hub: Hub) -> None:
    """Add the calls about join tokens."""
    for_admins = [allow(Role.ADMIN)]

    @app.post(
        "/v1/join-tokens",
        status_code=201,
        tags=["join tokens"],
        summary="Make a join token; only this answer tells its secret",
        dependencies=for_admins,
    )
    async def create(request: JoinTokenRequest) -> NewJoinToken:
        now = hub.clock()
        return await hub.writer.write(
            lambda connection: create_join_token(connection, request, now)
        )

    @app.get(
        "/v1/join-tokens",
        tags=["join tokens"],
        summary="All join tokens, without their secrets",
        dependencies=for_admins,
    )
    async def list_all() -> JoinTokenList:
        return await hub.read(lambda engine: list_join_tokens(engine, hub.unwritten_token_ids))

    @app.delete(
        "/v1/join-tokens/{token_id}",
        status_code=204,
        tags=["join tokens"],
        summary="Revoke a join token; machines that joined with it stay",
        responses=NOT_WRITTEN_YET,
        dependencies=for_admins,
    )
    async def revoke(token_id: _TokenId) -> Response:
        return taken_away(await hub.revoke_join_token(token_id))
