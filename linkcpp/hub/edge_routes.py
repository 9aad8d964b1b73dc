"""Calls about edges and gateways."""

from typing import Annotated

from fastapi import FastAPI, Path
from fastapi.responses import Response

from linkcpp.hub.errors import NOT_WRITTEN_YET, taken_away
from linkcpp.hub.roles import Caller, allow
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
from linkcpp.registry.records import Role

_EdgeId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="The edge's id")]


def add_edge_routes(app: FastAPI, hub: Hub) -> None:
    """Add them."""

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
