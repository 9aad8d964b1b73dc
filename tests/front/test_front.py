"""The front before a llama-server of the test's own, which can be made to lie."""

import asyncio
import contextlib
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from linkcpp.common.logs import REQUEST_LOGGER, JsonFormatter
from linkcpp.dispatch.access import ControlAccess
from linkcpp.dispatch.control import DispatchStatus
from linkcpp.dispatch.failures import FailureCounter
from linkcpp.front.openai_errors import error_of
from linkcpp.front.process import FrontConfig, run_front
from tests.support.dripping import dripping

CONTROL_TOKEN = "control"
ENGINE_KEY = "engine"
KEYS = ("first", "second")
STATUS: dict[str, Any] = {
    "workers": [], "fallback": None, "missing_expert_count": 1, "graph_count": 0,
    "compiled_count": 0, "client_count": 0, "dropped_bytes": 0, "early_count": 0,
    "differing_sum_count": 0, "call_count": 0, "pair_count": 0,
    "rerouted_pair_count": 0, "failed_pair_count": 2, "failed_call_count": 1, "late_count": 0,
    "nonsense_count": 0, "read_seconds": 0, "swarm_seconds": 0,
    "failures": [{"layer": 3, "experts": [4, 5, 9]}],
}  # fmt: skip


class Engine:
    """Plays llama-server and the control of the dispatch process."""

    def __init__(self, counter: FailureCounter) -> None:
        self.counter = counter
        self.erased: list[str] = []
        self.headers: dict[str, str] = {}
        self.bodies: list[bytes] = []
        self.released = asyncio.Event()
        self.aborted = asyncio.Event()
        self.begun = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        answer = await self._answer(request)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        self.headers = dict(request.headers)
        shown = request.headers.get("authorization")
        if path == "/status":
            assert shown == f"Bearer {CONTROL_TOKEN}"
            return JSONResponse(STATUS)
        if path not in ("/", "/health") and shown != f"Bearer {ENGINE_KEY}":
            return JSONResponse({"error": {"code": 401}}, 401)
        if path.startswith("/slots/"):
            self.erased.append(f"{path}?{request.url.query}")
            return JSONResponse({})
        self.bodies.append(await request.body())
        if path == "/stream":
            return StreamingResponse(self._events(), media_type="text/event-stream")
        if path == "/fail":
            self.counter.raise_by_one()
        return JSONResponse({"path": str(request.url.path), "query": request.url.query})

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            yield b"data: one\n\n"
            self.begun.set()
            await self.released.wait()
            yield b"data: two\n\n"
        except asyncio.CancelledError:
            self.aborted.set()
            raise


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def running_front(
    folder: Path, engine_port: int, *, keys: tuple[str, ...] = ()
) -> AsyncIterator[httpx.AsyncClient]:
    key_file = folder / "keys"
    key_file.write_text("# keys\n" + "\n".join(keys))
    control_file = folder / "control"
    control_file.write_text(ControlAccess(port=engine_port, token=CONTROL_TOKEN).model_dump_json())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = FrontConfig(
        host="127.0.0.1", port=port, engine_port=engine_port, engine_key=ENGINE_KEY, slot_count=2,
        api_key_file=key_file if keys else None, failure_counter=folder / "failures",
        control_file=control_file,
    )  # fmt: skip
    FailureCounter(config.failure_counter, is_writer=True)
    running = asyncio.create_task(run_front(config, print))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        await until(lambda: listens(port))
        yield client
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    engine = Engine(FailureCounter(tmp_path / "failures", is_writer=True))
    async with served(engine) as engine_port, running_front(tmp_path, engine_port) as client:
        yield client, engine


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another process or thread makes it so
            await asyncio.sleep(0.01)


Front = tuple[httpx.AsyncClient, Engine]


async def test_requests_and_answers_pass_through_as_they_are(front: Front) -> None:
    client, engine = front
    answer = await client.post("/v1/a%20b?x=1&y=%2F", json={"n": 1}, headers={"X-Mine": "yes"})
    assert answer.json() == {"path": "/v1/a b", "query": "x=1&y=%2F"}
    assert engine.headers["x-mine"] == "yes"
    assert json.loads(engine.bodies[-1]) == {"n": 1}
    assert (await client.get("/health")).status_code == 200


async def test_events_come_one_by_one(front: Front) -> None:
    client, engine = front
    async with client.stream("POST", "/stream", json={}) as answer:
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"data: one\n\n"
        engine.released.set()
        assert await anext(pieces) == b"data: two\n\n"
        assert [piece async for piece in pieces] == []


def requests_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == REQUEST_LOGGER]


async def test_a_client_that_goes_away_ends_the_request_at_llama_server(front: Front) -> None:
    client, engine = front
    async with client.stream("POST", "/stream", json={}) as answer:
        await anext(answer.aiter_bytes())
    assert await asyncio.wait_for(engine.aborted.wait(), 20)


async def test_a_failed_request_is_a_503_that_names_the_experts(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    client, engine = front
    caplog.set_level("INFO", "linkcpp")
    answer = await client.post("/fail", json={"prompt": "geheim"}, headers={"X-Request-ID": "r-1"})
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["missing_experts"] == [{"layer": 3, "experts": [4, 5, 9]}]
    assert "4-5,9 of layer 3" in error["message"]
    assert answer.headers["retry-after"]
    assert answer.headers["x-request-id"] == "r-1"
    (line,) = [json.loads(JsonFormatter().format(one)) for one in requests_in(caplog)]
    assert (line["level"], line["status"], line["request_id"]) == ("warning", 503, "r-1")
    assert line["problem"] == error["message"]
    assert line["ms"] > 0
    assert "geheim" not in caplog.text
    await until(lambda: len(engine.erased) == 2)
    assert engine.erased == ["/slots/0?action=erase", "/slots/1?action=erase"]


def test_an_answer_made_of_rows_that_differ_is_refused_without_naming_anybody() -> None:
    doubt = {"layer": 1, "experts": [7], "are_in_doubt": True}
    missing = STATUS["failures"][0]
    found = error_of(DispatchStatus.model_validate({**STATUS, "failures": [missing, doubt]}))
    assert found.status == 503
    assert "differed" in found.message
    assert not found.missing
    found = error_of(DispatchStatus.model_validate({**STATUS, "failures": [doubt, missing]}))
    assert found.missing == {3: (4, 5, 9)}


async def test_a_stream_that_fails_ends_with_an_error_and_without_the_wrong_words(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    client, engine = front
    async with client.stream("POST", "/stream", json={}) as answer:
        assert answer.status_code == 200
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"data: one\n\n"
        engine.counter.raise_by_one()
        engine.released.set()
        rest = b"".join([piece async for piece in pieces])
    assert b"two" not in rest
    event = json.loads(rest.removeprefix(b"data: "))
    assert event["error"]["code"] == 503
    await until(lambda: bool(requests_in(caplog)))
    assert "layer 3" in vars(requests_in(caplog)[0])["problem"]
    assert rest.endswith(b"\n\n")


async def test_a_stream_that_says_nothing_is_ended_as_well(front: Front) -> None:
    client, engine = front
    async with client.stream("POST", "/stream", json={}) as answer:
        pieces = answer.aiter_bytes()
        await anext(pieces)
        engine.counter.raise_by_one()
        assert b'"code": 503' in b"".join([piece async for piece in pieces])
    await asyncio.wait_for(engine.aborted.wait(), 20)


async def test_the_next_request_waits_until_llama_server_has_forgotten(front: Front) -> None:
    client, engine = front
    assert (await client.post("/fail", json={})).status_code == 503
    assert (await client.post("/next", json={})).status_code == 200
    assert len(engine.erased) == 2


async def test_slots_cannot_be_restored_from_outside(front: Front) -> None:
    client, engine = front
    answer = await client.post("/slots/0?action=restore", json={"filename": "x"})
    assert answer.status_code == 501
    assert engine.erased == []


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("OPTIONS *", b" 400 "),
        ("GET http://elsewhere.example/health", b" 400 "),
        ("POST http://elsewhere.example/v1/completions", b" 400 "),
        ("CONNECT elsewhere.example:80", b" 400 "),
        # Both lengths at once: the chunks count.
        ("POST /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5", b" 200 "),
    ],
)
async def test_an_odd_request_is_no_defect(front: Front, head: str, status: bytes) -> None:
    client, _ = front
    version = "" if "HTTP/" in head else " HTTP/1.1"
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    body = "2\r\n{}\r\n0\r\n\r\n" if "chunked" in head else ""
    writer.write(f"{head}{version}\r\nHost: x\r\nConnection: close\r\n\r\n{body}".encode())
    assert status in await asyncio.wait_for(reader.readline(), 20)
    writer.close()


def a_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def test_without_a_llama_server_the_answer_is_a_503(tmp_path: Path) -> None:
    async with running_front(tmp_path, a_free_port()) as client:
        answer = await client.post("/v1/completions", json={})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "not served right now" in answer.json()["error"]["message"]


@contextlib.asynccontextmanager
async def dying_engine(said: bytes) -> AsyncIterator[int]:
    """Answer every request with the same bytes, and then close in the middle."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def chunked(kind: str, *chunks: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    return (head + "".join(f"{len(each):x}\r\n{each}\r\n" for each in chunks)).encode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion"])
async def test_a_stream_whose_llama_server_dies_ends_with_an_error_event(
    tmp_path: Path, path: str
) -> None:
    said = chunked("text/event-stream", 'data: {"content": "one"}\n\ndata: {"con')
    async with dying_engine(said) as port, running_front(tmp_path, port) as client:
        # That this does not raise is the clean end of the connection's part.
        text = (await client.post(path, json={"stream": True})).text
    first, last = text.removesuffix("\n\n").split("\n\n")
    assert first == 'data: {"content": "one"}'
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == 502
    assert "broke off" in error["message"]


async def test_a_stream_with_named_events_ends_with_a_named_error(tmp_path: Path) -> None:
    said = chunked("text/event-stream", 'event: ping\ndata: {"type": "ping"}\n\n')
    async with dying_engine(said) as port, running_front(tmp_path, port) as client:
        text = (await client.post("/v1/messages", json={"stream": True})).text
    name, _, data = text.split("\n\n")[1].partition("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["type"] == "error"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200"])
async def test_an_answer_that_never_began_is_a_502(tmp_path: Path, said: bytes) -> None:
    async with dying_engine(said) as port, running_front(tmp_path, port) as client:
        answer = await client.post("/v1/completions", json={})
    assert answer.status_code == 502
    assert "stopped answering" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "said",
    [
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"a":',
        chunked("application/json", '{"a": 1}'),
    ],
)
async def test_a_cut_off_answer_does_not_look_whole(tmp_path: Path, said: bytes) -> None:
    async with dying_engine(said) as port, running_front(tmp_path, port) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", json={})


async def test_a_front_that_is_stopped_tells_its_streams(front: Front) -> None:
    client, engine = front
    async with client.stream("POST", "/stream", json={}) as answer:
        pieces = answer.aiter_bytes()
        await anext(pieces)
        signal.raise_signal(signal.SIGTERM)
        assert b"The deployment was stopped." in b"".join([piece async for piece in pieces])
    await asyncio.wait_for(engine.aborted.wait(), 20)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer second"}, 200),
        ({"X-Api-Key": "first"}, 200),
        ({"Authorization": "Bearer secon"}, 401),
        ({"Authorization": f"Bearer {ENGINE_KEY}"}, 401),
        ({"X-Api-Key": ENGINE_KEY}, 401),
        ({}, 401),
    ],
)
async def test_only_who_shows_a_key_of_the_file_may_use_llama_server(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    engine = Engine(FailureCounter(tmp_path / "failures", is_writer=True))
    async with (
        served(engine) as engine_port,
        running_front(tmp_path, engine_port, keys=KEYS) as client,
    ):
        for method, path in (("POST", "/x"), ("POST", "/tokenize"), ("GET", "/slots")):
            assert (await client.request(method, path, headers=headers)).status_code == status
        metrics = await client.get("/linkcpp/metrics", headers=headers)
        assert metrics.status_code == status
        assert (await client.get("/", headers=headers)).status_code == 200
        assert engine.headers.get("x-api-key") is None


@pytest.mark.slow
async def test_who_has_a_key_is_served_while_strangers_hold_hundreds_of_connections(
    tmp_path: Path,
) -> None:
    engine = Engine(FailureCounter(tmp_path / "failures", is_writer=True))
    async with (
        served(engine) as engine_port,
        running_front(tmp_path, engine_port, keys=KEYS) as client,
        dripping(client.base_url.port or 0, 560),
    ):
        headers = {"Authorization": f"Bearer {KEYS[0]}", "Connection": "close"}
        for _ in range(20):
            assert (await client.post("/x", headers=headers)).status_code == 200
