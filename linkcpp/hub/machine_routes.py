"""Calls about machines: health, joining, new tokens, lists, revocation."""

from collections import deque
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import FastAPI, Path
from fastapi.responses import Response, StreamingResponse

from linkcpp import __version__
from linkcpp.hub.errors import NOT_WRITTEN_YET, taken_away
from linkcpp.hub.machines import node_json, nodes_json
from linkcpp.hub.roles import HEALTH_PATH, Caller, allow
from linkcpp.hub.service import Hub
from linkcpp.registry.fields import UUID_PATTERN
from linkcpp.registry.records import (
    HubHealth,
    JoinAnswer,
    JoinRequest,
    NodeList,
    NodeToken,
    RegisteredNode,
    RenewRequest,
    Role,
)

_NodeId = Annotated[str, Path(pattern=UUID_PATTERN, description="The machine's id")]
_JSON = "application/json"


def add_machine_routes(app: FastAPI, hub: Hub) -> None:
    """Add them."""
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
