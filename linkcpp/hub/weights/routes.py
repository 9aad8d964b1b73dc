"""The calls of the hub's API that are about weights: ``linkcpp.registry.models`` lists them."""

import asyncio
from functools import partial
from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import Response

from linkcpp.hub.roles import Caller, allow
from linkcpp.hub.weights.library import Library
from linkcpp.hub.weights.streaming import DownloadResponse, Downloads
from linkcpp.model.parts import MAXIMUM_PARTS
from linkcpp.registry.models import (
    MAX_SEGMENTS_CHARACTERS,
    NAME_PATTERN,
    ServedModel,
    ServedModelList,
)
from linkcpp.registry.records import Role

_Name = Annotated[str, Path(pattern=NAME_PATTERN, description="What the hub calls the model")]
_Part = Annotated[int, Query(ge=1, le=MAXIMUM_PARTS, description="Which file of a split model")]
_Segments = Annotated[
    str,
    Query(
        max_length=MAX_SEGMENTS_CHARACTERS,
        description="LAYERS:EXPERTS, several with ';' between them: 0-3:0-31;4:16-63,128-255",
    ),
]
_Reader = Annotated[Caller, allow(Role.NODE, Role.BACKBONE, Role.ADMIN)]
_BYTES = {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}


def add_weight_routes(app: FastAPI, library: Library, downloads: Downloads) -> None:
    """Add the calls."""
    _add_records(app, library, downloads)
    _add_contents(app, library, downloads)


def _add_records(app: FastAPI, library: Library, downloads: Downloads) -> None:
    @app.get("/v1/models", tags=["models"], summary="All models of this hub")
    async def list_all(caller: _Reader) -> ServedModelList:
        entries = await asyncio.to_thread(library.catalogue.entries)
        return ServedModelList(models=tuple(entry.model for entry in entries))

    @app.head("/v1/models/{name}", include_in_schema=False)
    @app.get("/v1/models/{name}", tags=["models"], summary="One model", response_model=ServedModel)
    async def show(caller: _Reader, call: Request, name: _Name) -> Response:
        plan = partial(library.record, name)
        return DownloadResponse(plan, call, downloads, caller.node_id)

    @app.head("/v1/models/{name}/manifest", include_in_schema=False)
    @app.get(
        "/v1/models/{name}/manifest",
        tags=["models"],
        summary="The hashes of a model, or with `segments` of one slice",
    )
    async def manifest(
        caller: _Reader, call: Request, name: _Name, segments: _Segments | None = None
    ) -> Response:
        if segments is not None:
            plan = partial(library.slice_manifest, name, segments)
        else:
            takes_gzip = "gzip" in call.headers.get("Accept-Encoding", "")
            # A range counts the bytes of the manifest itself.
            packed = takes_gzip and "Range" not in call.headers
            plan = partial(library.manifest, name, packed=packed)
        return DownloadResponse(plan, call, downloads, caller.node_id)


def _add_contents(app: FastAPI, library: Library, downloads: Downloads) -> None:
    @app.head("/v1/models/{name}/header", include_in_schema=False)
    @app.get(
        "/v1/models/{name}/header",
        tags=["models"],
        summary="The front of a file of the model, up to the tensors' data",
        response_class=Response,
        responses={200: _BYTES},
    )
    async def header(caller: _Reader, call: Request, name: _Name, part: _Part = 1) -> Response:
        plan = partial(library.header, name, part)
        return DownloadResponse(plan, call, downloads, caller.node_id)

    @app.head("/v1/models/{name}/slice", include_in_schema=False)
    @app.get(
        "/v1/models/{name}/slice",
        tags=["models"],
        summary="A slice of the model, as `linkcpp slice` writes it",
        response_class=Response,
        responses={200: _BYTES},
    )
    async def slice_of(
        caller: _Reader, call: Request, name: _Name, segments: _Segments
    ) -> Response:
        plan = partial(library.slice, name, segments)
        return DownloadResponse(plan, call, downloads, caller.node_id)

    @app.head("/v1/models/{name}/backbone", include_in_schema=False)
    @app.get(
        "/v1/models/{name}/backbone",
        tags=["models"],
        summary="A hollow file of the model without its holes: the manifest's spans in a row",
        response_class=Response,
        responses={200: _BYTES},
    )
    async def backbone(caller: _Reader, call: Request, name: _Name, part: _Part = 1) -> Response:
        plan = partial(library.backbone, name, part)
        return DownloadResponse(plan, call, downloads, caller.node_id)
