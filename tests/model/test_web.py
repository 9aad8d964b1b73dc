"""Models behind HTTP: only the header crosses the network, and bad servers are named."""

import contextlib
import threading
from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.model.inventory import read_inventory
from linkcpp.model.parts import open_model
from tests.model.web_server import Answer, Handler, Server, asked_range, send, send_range
from tests.support.models import llama_parts, qwen35moe


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


def test_a_dead_proxy_is_not_used_for_this_machine(
    model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://192.0.2.1:9")
    assert read_inventory(model_url).digest == read_inventory(qwen35moe()).digest


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
    "of a size beyond every number": (
        lambda handler, _: send(handler, 206, b"G", Content_Range=f"bytes 0-0/{'9' * 5000}"),
        "does not tell the size",
    ),
    "that redirects to no host": (
        lambda handler, _: send(handler, 302, b"", Location="http://xn--/x"),
        "host name",
    ),
    "that redirects to a file": (
        lambda handler, _: send(handler, 302, b"", Location="file:///etc/passwd"),
        "unsupported protocol",
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


def test_a_server_that_drips_its_head_is_given_up(
    server: Server, model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drip(handler: Handler, data: bytes) -> None:
        handler.send_response(206)
        handler.flush_headers()
        handler.connection.settimeout(5)
        with contextlib.suppress(OSError):
            while not given_up.wait(0.02):
                handler.wfile.write(b"X-Patience: is a virtue\r\n"[:1])

    given_up = threading.Event()
    monkeypatch.setattr("linkcpp.model.web_client.HEAD_SECONDS", 0.3)
    server.answers["/repo/model.gguf"] = drip
    try:
        with pytest.raises(LinkcppError, match="no answer in time") as caught:
            read_inventory(model_url)
    finally:
        given_up.set()
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


@pytest.mark.parametrize(
    "address",
    [
        "http://",
        "http://[::1",
        "https:///x",
        "http://a:b/x.gguf",
        "http://xn--/x.gguf",
        f"http://{'a' * 300}/x.gguf",
    ],
)
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(LinkcppError, match=r"not a usable address|Cannot read"):
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
