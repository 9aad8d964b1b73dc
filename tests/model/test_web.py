"""Models behind HTTP: only the header crosses the network, and bad servers are named."""

import http.server
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.model.inventory import read_inventory
from linkcpp.model.parts import open_model
from tests.support.models import llama_parts, qwen35moe

Answer = Callable[["Handler", bytes], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ranges of the files that a test put on the server."""

    server: "Server"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.partition("?")[0]
        self.server.seen.append((self.path, dict(self.headers)))
        if answer := self.server.answers.get(name):
            answer(self, self.server.files.get(name, b""))
        elif name in self.server.files:
            send_range(self, self.server.files[name])
        else:
            send(self, 404, b"no such file")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.answers: dict[str, Answer] = {}
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.sent_bytes = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up: some tests make them."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def send(handler: Handler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
    handler.server.sent_bytes += len(body)


def asked_range(handler: Handler) -> tuple[int, int]:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers["Range"])
    assert match
    return int(match[1]), int(match[2])


def send_range(handler: Handler, data: bytes) -> None:
    first, last = asked_range(handler)
    if first >= len(data):
        send(handler, 416, b"")
        return
    body = data[first : last + 1]
    send(handler, 206, body, Content_Range=f"bytes {first}-{first + len(body) - 1}/{len(data)}")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def model_url(server: Server) -> str:
    server.files["/repo/model.gguf"] = qwen35moe().read_bytes()
    return f"{server.url}/repo/model.gguf"


def test_a_url_gives_what_the_file_gives_and_transfers_only_the_header(
    server: Server, model_url: str
) -> None:
    there, here = read_inventory(model_url), read_inventory(qwen35moe())
    assert there == here.model_copy(update={"source": model_url})
    assert server.sent_bytes < 0.01 * here.file_bytes


def test_weights_are_read_in_ranges(model_url: str) -> None:
    with open_model(model_url) as web, open_model(qwen35moe()) as disk:
        part, tensor = web.tensors[-1]
        wanted = (tensor.offset_bytes, 100)
        assert web.sources[part].read(*wanted) == disk.sources[part].read(*wanted)


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_part_of_a_split_url_finds_all_of_them(server: Server, named: int) -> None:
    for part in llama_parts():
        server.files[f"/{part.name}"] = part.read_bytes()
    url = f"{server.url}/{llama_parts()[named].name}?download=true"
    assert read_inventory(url).digest == read_inventory(llama_parts()[0]).digest
    assert all(path.endswith("?download=true") for path, _ in server.seen)


def test_a_missing_part_of_a_split_url_is_named(server: Server) -> None:
    parts = llama_parts()
    for part in parts[:2]:
        server.files[f"/{part.name}"] = part.read_bytes()
    with pytest.raises(LinkcppError, match=parts[2].name):
        read_inventory(f"{server.url}/{parts[0].name}")


def test_a_redirect_is_followed(server: Server, model_url: str) -> None:
    server.answers["/moved.gguf"] = lambda handler, _: send(handler, 302, b"", Location=model_url)
    assert read_inventory(f"{server.url}/moved.gguf").digest == read_inventory(model_url).digest


def send_too_much(handler: Handler, data: bytes) -> None:
    first, last = asked_range(handler)
    body = bytes(8 * 2**20)
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {first}-{last}/{2**40}")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def send_too_little(handler: Handler, data: bytes) -> None:
    first, last = asked_range(handler)
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def break_off(handler: Handler, data: bytes) -> None:
    first, last = asked_range(handler)
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
    handler.send_header("Content-Length", str(last - first + 1))
    handler.end_headers()
    handler.close_connection = True


def send_another_range(handler: Handler, data: bytes) -> None:
    send(handler, 206, data[1:2], Content_Range=f"bytes 1-1/{len(data)}")


BAD_SERVERS: dict[str, tuple[Answer, str]] = {
    "without ranges": (lambda handler, data: send(handler, 200, data), "does not serve ranges"),
    "of nothing": (lambda handler, _: send(handler, 404, b""), "no file at"),
    "that wants a token": (lambda handler, _: send(handler, 401, b""), "without the right token"),
    "that forbids": (lambda handler, _: send(handler, 403, b""), "without the right token"),
    "that fails": (lambda handler, _: send(handler, 503, b""), "HTTP 503"),
    "of an empty file": (lambda handler, _: send(handler, 416, b""), "is empty"),
    "of an endless body": (send_too_much, "more bytes than were asked for"),
    "of too few bytes": (send_too_little, "sent 0 bytes"),
    "that breaks off": (break_off, "Cannot read"),
    "of another range": (send_another_range, "another range"),
    "without a size": (
        lambda handler, _: send(handler, 206, b"G", Content_Range="bytes 0-0/*"),
        "does not tell the size",
    ),
    "that redirects for ever": (
        lambda handler, _: send(handler, 302, b"", Location=handler.path),
        "redirects more than",
    ),
}


@pytest.mark.parametrize("which", sorted(BAD_SERVERS))
def test_a_bad_server_is_named(server: Server, model_url: str, which: str) -> None:
    answer, words = BAD_SERVERS[which]
    server.answers["/repo/model.gguf"] = answer
    with pytest.raises(LinkcppError, match=words) as caught:
        read_inventory(model_url)
    assert caught.value.hint


def test_a_file_cut_off_on_the_server_is_truncated(server: Server, model_url: str) -> None:
    server.files["/repo/model.gguf"] = server.files["/repo/model.gguf"][:-1000]
    with pytest.raises(LinkcppError, match="is truncated: tensor"):
        read_inventory(model_url)


def test_a_file_that_changes_meanwhile_is_named(server: Server, model_url: str) -> None:
    def grow(handler: Handler, data: bytes) -> None:
        server.files["/repo/model.gguf"] = data + b"x"
        send_range(handler, data)

    server.answers["/repo/model.gguf"] = grow
    with pytest.raises(LinkcppError, match="changed while it was read"):
        read_inventory(model_url)


def test_a_web_page_is_not_taken_for_a_model(server: Server) -> None:
    server.files["/page.gguf"] = b"<!DOCTYPE html>" + bytes(200)
    with pytest.raises(LinkcppError, match="web page"):
        read_inventory(f"{server.url}/page.gguf")


def test_nobody_at_the_address_is_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(LinkcppError, match="Cannot read http"):
        read_inventory("http://127.0.0.1:1/model.gguf")


@pytest.mark.parametrize("address", ["http://", "http://[::1", "https:///x", "http://a:b/x.gguf"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(LinkcppError, match=r"no usable address|Cannot read"):
        read_inventory(address)


def test_the_token_is_sent_where_the_user_points(
    server: Server, model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINKCPP_MODEL_TOKEN", "a-token")
    read_inventory(model_url)
    assert {headers["Authorization"] for _, headers in server.seen} == {"Bearer a-token"}


def test_the_token_does_not_follow_a_redirect_to_another_server(
    server: Server, model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINKCPP_MODEL_TOKEN", "a-token")
    elsewhere = model_url.replace("127.0.0.1", "localhost")
    server.answers["/moved.gguf"] = lambda handler, _: send(handler, 302, b"", Location=elsewhere)
    read_inventory(f"{server.url}/moved.gguf")
    told = {path: headers.get("Authorization") for path, headers in server.seen}
    assert told == {"/moved.gguf": "Bearer a-token", "/repo/model.gguf": None}


def test_no_token_without_need(server: Server, model_url: str) -> None:
    read_inventory(model_url)
    assert all("Authorization" not in headers for _, headers in server.seen)


def test_secrets_in_an_address_are_not_repeated(server: Server, model_url: str) -> None:
    address = model_url.replace("http://", "http://user:hush@") + "?signature=hush"
    assert "hush" not in read_inventory(address).model_dump_json()
    server.files.clear()
    with pytest.raises(LinkcppError) as caught:
        read_inventory(address)
    assert "hush" not in str(caught.value)
