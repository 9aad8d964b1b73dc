"""What listens for the API in mode ``experts``: passes everything on to llama-server and back.

``python -m linkcpp.front CONFIG.json`` is a process of its own, so that neither a
slow client nor a burst of tokens delays the tunnels to the workers in the supervisor.

Where a row could not be computed, llama-server has already taken it for a real one and goes on. The
front knows better: the answer of every request under way becomes an error, and before the next one
begins llama-server forgets what it keeps of the prompts (``gate``).
"""

import asyncio
import hmac
import re
from pathlib import Path

import httpx
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from linkcpp.common.metrics import metrics_response
from linkcpp.common.programs import Announce, run_program
from linkcpp.common.records import Record
from linkcpp.common.request_log import RequestLog
from linkcpp.common.serving import BoundedHttpProtocol
from linkcpp.common.sockets import listen
from linkcpp.dispatch.failures import FailureCounter
from linkcpp.dispatch.metrics import dispatch_metrics
from linkcpp.front.exchange import Exchange
from linkcpp.front.gate import Cleaner, Gate, GateShutError
from linkcpp.front.keys import read_api_key
from linkcpp.front.refusals import Refusal, Refusals
from linkcpp.front.upstream import Upstream

READY_PATTERN = r"^front ready"
# llama-server has metrics of its own at /metrics.
EXPERTS_METRICS_PATH = "/linkcpp/metrics"

# llama-server computes nothing for these, so they can neither fail nor leave anything behind.
_WITHOUT_COMPUTING = frozenset(
    {"/tokenize", "/detokenize", "/apply-template", "/props", "/lora-adapters"}
)
# Saving and restoring caches would bring back what the front had erased.
_SLOT_ACTION = re.compile(r"/slots/[^/]*/?")
_MOST_REQUESTS = 1024
_MOST_HEAD_BYTES = 64 * 2**10
_IDLE_SECONDS = 75


class FrontConfig(Record):
    """What the front is told. Ports are those of llama-server and of the dispatch control."""

    host: str
    port: int
    engine_port: int
    slot_count: int
    api_key_file: Path | None
    failure_counter: Path
    control_port: int
    control_token: str


class Front:
    """The ASGI application."""

    def __init__(self, upstream: Upstream, gate: Gate, refusals: Refusals, key: str | None) -> None:
        self._upstream = upstream
        self._gate = gate
        self._refusals = refusals
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == EXPERTS_METRICS_PATH:
            await self._tell_metrics(scope, receive, send)
        elif scope["method"] != "POST" or path in _WITHOUT_COMPUTING:
            await Exchange(self._upstream, scope, receive, send).run()
        elif _SLOT_ACTION.fullmatch(path):
            refusal = Refusal(501, "Saving, restoring and erasing slots is switched off.")
            await self._refuse(refusal, scope, receive, send)
        else:
            await self._compute(scope, receive, send)

    async def _compute(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._upstream, scope, receive, send)
        try:
            async with self._gate.passage() as passage:
                await exchange.run(passage)
        except GateShutError as error:
            await self._refuse(Refusal(503, str(error)), scope, receive, send)
            return
        # Only now, when nothing of the request is under way any more: the gate need not wait.
        if exchange.has_failed:
            await exchange.refuse(await self._refusals.describe())

    async def _tell_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a scrape of what the virtual device and its workers did."""
        shown = dict(scope["headers"]).get(b"authorization", b"")
        if self._key and not hmac.compare_digest(shown, f"Bearer {self._key}".encode()):
            await self._refuse(Refusal(401, "Metrics need the API key."), scope, receive, send)
            return
        status = await self._refusals.status()
        if status is None:
            refusal = Refusal(502, "The dispatch process does not answer.")
            await self._refuse(refusal, scope, receive, send)
            return
        await metrics_response(dispatch_metrics(status))(scope, receive, send)

    async def _refuse(self, refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["problem"] = refusal.message
        headers = {"Retry-After": "5"} if refusal.status == httpx.codes.SERVICE_UNAVAILABLE else {}
        answer = JSONResponse(refusal.body(), refusal.status, headers)
        await answer(scope, receive, send)


def _is_routine(scope: Scope, _: int) -> bool:
    """Whether a request computes nothing, as those of programs that watch."""
    return bool(scope["method"] != "POST" or scope["path"] in _WITHOUT_COMPUTING)


async def run_front(config: FrontConfig, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT; ``announce`` gets a line once it listens.

    Raises:
        LinkcppError: the port cannot be had, or llama-server does not forget what is wrong.
    """
    key = read_api_key(config.api_key_file) if config.api_key_file else None
    upstream = Upstream(config.engine_port)
    cleaner = Cleaner(upstream, config.slot_count, key)
    gate = Gate(FailureCounter(config.failure_counter), cleaner.clean)
    refusals = Refusals(config.control_port, config.control_token)
    server = uvicorn.Server(
        uvicorn.Config(
            RequestLog(Front(upstream, gate, refusals, key), _is_routine),
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_REQUESTS,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
        )
    )
    sockets = listen(config.host, config.port)
    announce(f"front ready on port {config.port}")
    serving = asyncio.create_task(server.serve(sockets=sockets))
    watching = asyncio.create_task(gate.watch())
    await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    await upstream.aclose()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    if not watching.cancelled() and (failure := watching.exception()) is not None:
        raise failure


def main(arguments: list[str]) -> int:
    """Run from a file with the configuration as JSON."""
    return run_program(arguments, FrontConfig, run_front)
