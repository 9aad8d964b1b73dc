"""What went wrong on the network is told in words, never by the name of an exception."""

import asyncio
import socket

import httpx
import pytest
from websockets.asyncio.client import connect

from linkcpp.common.http_client import RemoteService, ServiceError
from linkcpp.common.network_errors import in_words


async def _fail(url: str, *, timeout_seconds: float = 60.0) -> Exception:
    try:
        async with httpx.AsyncClient(timeout=timeout_seconds, trust_env=False) as http:
            await http.get(url)
    except httpx.HTTPError as error:
        return error
    raise AssertionError("it answered")


async def test_a_port_where_nothing_listens_and_a_name_that_nobody_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert in_words(await _fail(f"http://127.0.0.1:{port}")).startswith("nothing listens there")
    assert in_words(await _fail("http://nobody.invalid")) == "its name cannot be looked up"
    with pytest.raises(OSError, match=r"refused|failed") as refused:
        await connect(f"ws://127.0.0.1:{port}", proxy=None)
    assert in_words(refused.value).startswith("nothing listens there")


async def test_a_service_that_stalls_closes_or_speaks_no_tls() -> None:
    async def stall(*_: asyncio.StreamReader | asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    for serve, scheme, words, seconds in (
        (stall, "http", "no answer in time", 0.5),
        (close, "http", "it closed the connection", 60.0),
        (close, "https", "connection", 60.0),
    ):
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            failed = await _fail(f"{scheme}://127.0.0.1:{port}", timeout_seconds=seconds)
            assert words in in_words(failed)


@pytest.mark.parametrize("kind", [httpx.ReadTimeout, httpx.ConnectError, httpx.ReadError, OSError])
def test_an_error_without_a_text_has_words_all_the_same(kind: type[Exception]) -> None:
    words = in_words(kind(""))
    assert words
    assert kind.__name__ not in words


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_that_answers_in_the_place_of_a_hub_is_not_taken_for_something_else(
    status: int,
) -> None:
    hub = RemoteService("hub", "https://hub.example", "See that it runs.", ServiceError)
    with pytest.raises(ServiceError, match="cannot be reached: a proxy on the way") as told:
        hub.told(status, b"<html>Bad Gateway</html>")
    assert told.value.code == "unreachable"
    with pytest.raises(ServiceError, match="is not a linkcpp hub"):
        hub.told(404, b"<html>Not Found</html>")
