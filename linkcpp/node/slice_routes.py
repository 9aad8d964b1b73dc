"""The calls of the agent's API that are about slices."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from linkcpp.common.access import peer_of
from linkcpp.model.slices.manifest import Manifest
from linkcpp.node.limits import RefusedError
from linkcpp.node.records import SliceId, SliceList, SliceRecord, SliceRequest
from linkcpp.node.slice_store import SliceStore

STALL_SECONDS = 30.0

_PATH_ID = Path(pattern=r"^[0-9a-f]{32}$", description="The id of a slice, as slice_id makes it")
_Id = Annotated[str, _PATH_ID]


def add_slice_routes(app: FastAPI, store: SliceStore) -> None:
    """Add the calls."""
    _add_record_routes(app, store)
    _add_content_routes(app, store)


def _add_record_routes(app: FastAPI, store: SliceStore) -> None:
    @app.post("/v1/slices", status_code=202, tags=["slices"], summary="Fetch a slice from the web")
    async def fetch(request: SliceRequest, call: Request) -> SliceRecord:
        return await store.fetch(request, peer_of(call))

    @app.get("/v1/slices", tags=["slices"], summary="All slices of this node")
    async def list_all() -> SliceList:
        return SliceList(slices=store.records(), offered_bytes=store.offered_bytes())

    @app.get("/v1/slices/{slice_id}", tags=["slices"], summary="One slice, and how far it is")
    async def show(slice_id: _Id) -> SliceRecord:
        return await store.show(SliceId(slice_id))

    @app.delete(
        "/v1/slices/{slice_id}",
        status_code=204,
        tags=["slices"],
        summary="Delete it; also fine when it is gone",
    )
    async def delete(slice_id: _Id) -> Response:
        await store.delete(SliceId(slice_id))
        return Response(status_code=204)


def _add_content_routes(app: FastAPI, store: SliceStore) -> None:
    @app.put(
        "/v1/slices/{slice_id}/manifest",
        tags=["slices"],
        summary="Tell what the slice that follows has to be",
        openapi_extra=_body("application/json", Manifest.__name__),
    )
    async def put_manifest(slice_id: _Id, call: Request) -> SliceRecord:
        body = await call.body()
        try:
            # Megabytes of hashes: not in the event loop.
            manifest = await asyncio.to_thread(Manifest.model_validate_json, body)
        except ValidationError as error:
            problem = error.errors()[0]
            raise RefusedError(
                422, "invalid_request", f"This is not a manifest: {problem['msg'][:200]}."
            ) from error
        return await store.begin_upload(SliceId(slice_id), manifest, peer_of(call))

    @app.get(
        "/v1/slices/{slice_id}/manifest",
        tags=["slices"],
        summary="The hashes of a slice that is whole",
        response_model=Manifest,
    )
    async def get_manifest(slice_id: _Id) -> Response:
        return Response(await store.manifest(SliceId(slice_id)), media_type="application/json")

    @app.put(
        "/v1/slices/{slice_id}",
        tags=["slices"],
        summary="Send bytes of the slice, from `offset` on",
        openapi_extra=_body("application/octet-stream"),
    )
    async def upload(
        slice_id: _Id, call: Request, offset: Annotated[int, Query(ge=0, lt=2**50)]
    ) -> SliceRecord:
        try:
            return await store.upload(SliceId(slice_id), offset, _parts(call))
        except ClientDisconnect:
            raise RefusedError(
                400, "interrupted", "The connection ended before the body did."
            ) from None


async def _parts(call: Request) -> AsyncIterator[bytes]:
    """Yield the body as it comes; a client that stalls is left."""
    stream = aiter(call.stream())
    while True:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                part = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RefusedError(
                408, "too_slow", f"No bytes came for {STALL_SECONDS:g} seconds."
            ) from None
        yield part


def _body(kind: str, record: str | None = None) -> dict[str, Any]:
    schema = {"schema": {"$ref": f"#/components/schemas/{record}"}} if record else {}
    return {"requestBody": {"required": True, "content": {kind: schema}}}
