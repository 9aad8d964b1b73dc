"""The calls of the agent's API that are about expert workers."""

import asyncio
from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import PlainTextResponse, Response

from linkcpp.common.access import peer_of
from linkcpp.common.errors import LinkcppError
from linkcpp.link.acceptor import HandedEdge, LinkAcceptor
from linkcpp.link.program import tell_offer
from linkcpp.node.limits import RefusedError
from linkcpp.node.records import (
    NewWorker,
    WorkerEdge,
    WorkerId,
    WorkerList,
    WorkerRecord,
    WorkerRequest,
)
from linkcpp.node.workers import WorkerManager

MAX_LOG_LINES = 10_000

_PATH_ID = Path(pattern=r"^[0-9a-f]{32}$", description="The id that POST /v1/workers answered")
_Id = Annotated[str, _PATH_ID]


def add_worker_routes(
    app: FastAPI, workers: WorkerManager, links: Callable[[], LinkAcceptor]
) -> None:
    """Add the calls; ``links`` are there once the agent serves."""

    @app.post("/v1/workers", status_code=201, tags=["workers"], summary="Run an expert worker")
    async def create(request: WorkerRequest, call: Request) -> NewWorker:
        return await workers.create(request, peer_of(call))

    @app.get("/v1/workers", tags=["workers"], summary="All expert workers of this node")
    async def list_all() -> WorkerList:
        return WorkerList(workers=workers.records())

    @app.get("/v1/workers/{worker_id}", tags=["workers"], summary="One expert worker")
    async def show(worker_id: _Id) -> WorkerRecord:
        return workers.get(worker_id).record()

    @app.post("/v1/workers/{worker_id}/renew", tags=["workers"], summary="Start its lease again")
    async def renew(worker_id: _Id) -> WorkerRecord:
        return workers.renew(WorkerId(worker_id))

    @app.post(
        "/v1/workers/{worker_id}/edge",
        status_code=204,
        tags=["workers"],
        summary="Let its own link take an edge of a hub",
    )
    async def use_edge(worker_id: _Id, request: WorkerEdge, call: Request) -> Response:
        door = workers.get(worker_id).link.door
        handed = HandedEdge(peer_of(call), lambda offer: tell_offer(offer, door))
        try:
            await links().hand_over(request.edge_id, handed)
        except LinkcppError as error:
            raise RefusedError(409, "too_many_edges", error.message) from None
        return Response(status_code=204)

    @app.delete(
        "/v1/workers/{worker_id}",
        status_code=204,
        tags=["workers"],
        summary="Stop it; also fine when it is gone",
    )
    async def delete(worker_id: _Id, call: Request) -> Response:
        await workers.delete(worker_id, peer_of(call))
        return Response(status_code=204)

    @app.get(
        "/v1/workers/{worker_id}/logs",
        response_class=PlainTextResponse,
        tags=["workers"],
        summary="The last lines that it and its rpc-server printed",
    )
    async def logs(
        worker_id: _Id, tail: Annotated[int, Query(ge=1, le=MAX_LOG_LINES)] = 200
    ) -> str:
        return await asyncio.to_thread(workers.logs, worker_id, tail)
