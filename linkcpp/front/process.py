"""What listens for the API of a deployment: passes everything on to llama-server and back.

``python -m linkcpp.front CONFIG.json`` is a process of its own, so that neither a
slow client nor a burst of tokens delays the tunnels to the nodes in the supervisor. It lives as
long as the deployment: llama-server behind it may end and be started again.

In mode ``experts``, where a row could not be computed, llama-server has already taken it for a real
one and goes on. The front knows better: the answer of every request under way becomes an error, and
before the next one begins llama-server forgets what it keeps of the prompts (``gate``).
"""

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import httpx
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from linkcpp.common.access import let_in
from linkcpp.common.child_main import Announce, run_child
from linkcpp.common.http_server import make_server
from linkcpp.common.metrics import metrics_response
from linkcpp.common.records import Record
from linkcpp.common.request_log import RequestLog
from linkcpp.common.sockets import listen
from linkcpp.dispatch.failures import FailureCounter
from linkcpp.dispatch.metrics import dispatch_metrics
from linkcpp.front.api_keys import read_api_keys, shows_key
from linkcpp.front.gate import Gate, GateShutError, SlotEraser
from linkcpp.front.openai_errors import ApiError, DispatchClient
from linkcpp.front.proxied_request import ProxiedRequest
from linkcpp.front.upstream import Upstream

READY_PATTERN = r"^front ready"
# llama-server has metrics of its own at /metrics.
EXPERTS_METRICS_PATH = "/linkcpp/metrics"
# llama-server's /health does not tell whether the front lives.
HEALTH_PATH = "/linkcpp/health"

# llama-server computes nothing for these, so they can neither fail nor leave anything behind.
_WITHOUT_COMPUTING = frozenset(
    {"/tokenize", "/detokenize", "/apply-template", "/props", "/lora-adapters"}
)
# Saving and restoring caches would bring back what the front had erased.
_SLOT_ACTION = re.compile(r"/slots/[^/]*/?")
_MAX_HEAD_BYTES = 64 * 2**10
_IDLE_SECONDS = 75


class FrontConfig(Record):
    """What the front is told.

    ``engine_port`` and ``engine_key`` are llama-server's. Of the dispatch process there are
    ``failure_counter`` and ``control_file``; without one nothing is counted, and there is no such
    file.
    """

    host: str
    port: int
    engine_port: int
    engine_key: str
    slot_count: int
    api_key_file: Path | None
    failure_counter: Path
    control_file: Path


class Front:
    """The ASGI application; without ``keys`` everybody is let in. ``stopping`` ends all answers."""

    def __init__(
        self, upstream: Upstream, gate: Gate, dispatch: DispatchClient, keys: tuple[str, ...]
    ) -> None:
        self._upstream = upstream
        self._gate = gate
        self._dispatch = dispatch
        self._keys = keys
        self.stopping = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        is_let_in = not self._keys or shows_key(scope["headers"], self._keys)
        if is_let_in:
            let_in(scope)
        is_computing = scope["method"] == "POST" and path not in _WITHOUT_COMPUTING
        if path == HEALTH_PATH:
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif not is_let_in and (is_computing or path == EXPERTS_METRICS_PATH):
            await self._refuse(ApiError(401, "Invalid API Key"), scope, receive, send)
        elif path == EXPERTS_METRICS_PATH:
            await self._tell_metrics(scope, receive, send)
        elif not is_computing:
            await self._proxied(scope, receive, send, with_key=is_let_in).run()
        elif _SLOT_ACTION.fullmatch(path):
            error = ApiError(501, "Saving, restoring and erasing slots is switched off.")
            await self._refuse(error, scope, receive, send)
        else:
            await self._compute(scope, receive, send)

    def _proxied(
        self, scope: Scope, receive: Receive, send: Send, *, with_key: bool
    ) -> ProxiedRequest:
        return ProxiedRequest(
            self._upstream, scope, receive, send, with_key=with_key, stopping=self.stopping
        )

    async def _compute(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._proxied(scope, receive, send, with_key=True)
        try:
            async with self._gate.request() as in_flight:
                await request.run(in_flight)
        except GateShutError as error:
            await self._refuse(ApiError(503, str(error)), scope, receive, send)
            return
        # Only now, when nothing of the request is under way any more: the gate need not wait.
        if request.has_failed:
            await request.refuse(await self._dispatch.failure())

    async def _tell_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a scrape of what the virtual device and its workers did."""
        status = await self._dispatch.status()
        if status is None:
            error = ApiError(502, "No dispatch process answers: only mode experts has one.")
            await self._refuse(error, scope, receive, send)
            return
        await metrics_response(dispatch_metrics(status))(scope, receive, send)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["problem"] = error.message
        headers = {"Retry-After": "5"} if error.status == httpx.codes.SERVICE_UNAVAILABLE else {}
        answer = JSONResponse(error.body(), error.status, headers)
        await answer(scope, receive, send)


def _is_routine(scope: Scope, _: int) -> bool:
    """Whether a request computes nothing, as those of programs that watch."""
    return bool(scope["method"] != "POST" or scope["path"] in _WITHOUT_COMPUTING)


async def run_front(config: FrontConfig, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT; ``announce`` gets a line once it listens.

    Raises:
        LinkcppError: the port cannot be had, or llama-server does not forget what is wrong.
    """
    keys = read_api_keys(config.api_key_file) if config.api_key_file else ()
    upstream = Upstream(config.engine_port, config.engine_key)
    eraser = SlotEraser(upstream, config.slot_count)
    gate = Gate(FailureCounter(config.failure_counter), eraser.erase_all)
    front = Front(upstream, gate, DispatchClient(config.control_file), keys)
    server = make_server(
        RequestLog(front, _is_routine),
        max_head_bytes=_MAX_HEAD_BYTES,
        idle_seconds=_IDLE_SECONDS,
    )
    sockets = listen(config.host, config.port)
    announce(f"front ready on port {config.port}")
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, front.stopping.set)
    serving = asyncio.create_task(server.serve(sockets=sockets))
    watching = asyncio.create_task(gate.watch())
    stopping = asyncio.create_task(front.stopping.wait())
    try:
        ends: set[asyncio.Task[Any]] = {serving, watching, stopping}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        front.stopping.set()
        server.should_exit = True
        await serving
        await upstream.aclose()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    if not watching.cancelled() and (failure := watching.exception()) is not None:
        raise failure


def main(arguments: list[str]) -> int:
    """Run from a file with the configuration as JSON."""
    return run_child(arguments, FrontConfig, run_front)
