"""Calls about join tokens."""

from typing import Annotated

from fastapi import FastAPI, Path
from fastapi.responses import Response

from linkcpp.hub.errors import NOT_WRITTEN_YET, taken_away
from linkcpp.hub.join_tokens import create_join_token, list_join_tokens
from linkcpp.hub.roles import allow
from linkcpp.hub.service import Hub
from linkcpp.registry.fields import UUID_PATTERN
from linkcpp.registry.records import JoinTokenList, JoinTokenRequest, NewJoinToken, Role

_TokenId = Annotated[str, Path(pattern=UUID_PATTERN, description="The token's id, not its secret")]


def add_token_routes(app: FastAPI, hub: Hub) -> None:
    """Add them."""
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
