"""What a hub sends: the very bytes that `linkcpp slice` writes, whole or any range of them."""

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linkcpp.hub.weights import streaming
from linkcpp.hub.weights.byte_ranges import ByteRange, asked_range
from linkcpp.hub.weights.layout import Extent, Layout
from linkcpp.hub.weights.library import Content, Library
from linkcpp.model.slices.manifest import Manifest, manifest_path
from linkcpp.model.slices.model_manifest import ModelManifest
from tests.hub.weights.small_hub import SmallHub, add
from tests.model import random_models as drawn
from tests.model.test_slices import cut
from tests.support.lengths import repeated
from tests.support.models import gpt_oss, qwen3moe

CHOSEN = "0:0-3;2:4-9"
SLICE = f"/v1/models/m/slice?segments={CHOSEN}"


def get(hub: SmallHub, path: str, token: str = "node-token", **headers: str) -> httpx.Response:  # noqa: S107
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.get(hub.url + path, headers={"Authorization": f"Bearer {token}", **names})


def split_model(folder: Path) -> Path:
    layer = drawn.Layer(6, drawn.FUSED, ("Q4_K", "F16"), 256, 4, ("bias", "scale"))
    folder.mkdir()
    return drawn.Model((layer,) * 3, files=3, seed=1).write(folder)


@pytest.mark.parametrize("name", ["gpt-oss", "split"])
def test_a_slice_is_what_linkcpp_slice_writes(name: str, tmp_path: Path) -> None:
    model = gpt_oss() if name == "gpt-oss" else split_model(tmp_path / "model")
    add(tmp_path / "models", model)
    here = cut(model, tmp_path / "slice.gguf", "1-2:0-2,4")
    with SmallHub(tmp_path / "models") as hub:
        answer = get(hub, "/v1/models/m/slice?segments=1-2:0-2,4")
        assert answer.content == here.path.read_bytes()
        assert int(answer.headers["Content-Length"]) == here.file_bytes
        told = get(hub, "/v1/models/m/manifest?segments=1-2:0-2,4").content
    written = Manifest.model_validate_json(manifest_path(here.path).read_bytes())
    assert Manifest.model_validate_json(told) == written


def test_a_hollow_file_is_sent_without_its_holes(hub: SmallHub) -> None:
    content = qwen3moe().read_bytes()
    whole = ModelManifest.model_validate_json(get(hub, "/v1/models/m/manifest").content)
    spans = whole.parts[0].spans
    sent = get(hub, "/v1/models/m/backbone").content
    assert sent == b"".join(content[s.offset_bytes :][: s.size_bytes] for s in spans)
    assert len(sent) < len(content) // 4
    header = get(hub, "/v1/models/m/header?part=1").content
    assert header == content[: whole.parts[0].header_bytes]


def test_a_manifest_is_packed_for_who_can_unpack_it(hub: SmallHub) -> None:
    path = "/v1/models/m/manifest"
    with httpx.stream(
        "GET",
        hub.url + path,
        headers={"Authorization": "Bearer node-token", "Accept-Encoding": "gzip"},
    ) as answer:
        packed = b"".join(answer.iter_raw())
    plain = get(hub, path, Accept_Encoding="identity")
    assert answer.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed) == plain.content
    assert len(packed) < len(plain.content)
    assert answer.headers["ETag"] != plain.headers["ETag"]
    part = get(hub, path, Range="bytes=10-19")
    assert part.content == plain.content[10:20]


@given(data=st.data())
@settings(
    max_examples=repeated(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_range_of_a_slice_is_that_of_the_file(
    hub: SmallHub, tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "slice.gguf"
    if not path.exists():
        cut(qwen3moe(), path, *CHOSEN.split(";"))
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content) - 1))
    length = data.draw(st.one_of(st.integers(1, 5000), st.integers(1, len(content))))
    end = min(start + length, len(content))
    answer = get(hub, SLICE, Range=f"bytes={start}-{start + length - 1}")
    assert answer.status_code == 206
    assert answer.headers["Content-Range"] == f"bytes {start}-{end - 1}/{len(content)}"
    assert answer.content == content[start:end]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 60), st.data())
def test_a_layout_gives_every_byte_once_and_no_piece_is_too_large(
    sizes: list[int], max_bytes: int, data: st.DataObject
) -> None:
    source = bytes(range(256)) * 2
    kinds = st.sampled_from(["file", "memory", "zeros"])
    extents, expected = [], b""
    for size in sizes:
        offset = data.draw(st.integers(0, 400))
        kind = data.draw(kinds)
        content = source[offset : offset + size] if kind != "zeros" else bytes(size)
        expected += content
        extents.append(
            Extent(size, 0, offset)
            if kind == "file"
            else Extent(size, None, 0, content if kind == "memory" else None)
        )
    layout = Layout(extents)
    start = data.draw(st.integers(0, len(expected)))
    end = data.draw(st.integers(start, len(expected)))
    found = b""
    for piece in layout.pieces(start, end, max_bytes):
        part = b"".join(
            source[e.offset_bytes :][: e.size_bytes]
            if e.file == 0
            else e.content or bytes(e.size_bytes)
            for e in piece
        )
        assert 0 < len(part) <= max_bytes
        found += part
    assert found == expected[start:end]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", ByteRange(0, 1)),
        ("bytes=5-", ByteRange(5, 100)),
        ("bytes=-7", ByteRange(93, 100)),
        ("bytes=-700", ByteRange(0, 100)),
        ("Bytes = 5 - 9", ByteRange(5, 10)),
        ("bytes=90-900", ByteRange(90, 100)),
        ("bytes=100-", ByteRange(None, None)),
        ("bytes=-0", ByteRange(None, None)),
        ("bytes=9-5", None),
        ("bytes=-", None),
        ("bytes=0-1,5-6", None),
        ("lines=0-1", None),
        ("bytes=" + "9" * 30 + "-", None),
        ("nonsense", None),
    ],
)
def test_ranges_are_read_as_the_rfc_has_them(header: str, expected: ByteRange | None) -> None:
    assert asked_range(header, None, '"e"', 100) == expected


def test_ranges_of_another_state_are_not_mixed(hub: SmallHub) -> None:
    whole = get(hub, SLICE)
    etag = whole.headers["ETag"]
    assert get(hub, SLICE, Range="bytes=1-2", If_Range=etag).content == whole.content[1:3]
    other = get(hub, SLICE, Range="bytes=1-2", If_Range='"other"')
    assert (other.status_code, other.content) == (200, whole.content)
    assert get(hub, SLICE, If_None_Match=etag).status_code == 304
    beyond = get(hub, SLICE, Range=f"bytes={len(whole.content)}-")
    assert beyond.status_code == 416
    assert beyond.headers["Content-Range"] == f"bytes */{len(whole.content)}"
    assert get(hub, "/v1/models/m/slice?segments=0:0-3").headers["ETag"] != etag
    # However it is written, it is the same slice.
    same = get(hub, "/v1/models/m/slice?segments=2:4-9;0:2-3;0:0-2")
    assert same.headers["ETag"] == etag


def test_a_head_tells_the_size_and_sends_nothing(hub: SmallHub) -> None:
    answer = httpx.head(hub.url + SLICE, headers={"Authorization": "Bearer node-token"})
    assert answer.status_code == 200
    assert int(answer.headers["Content-Length"]) > 10**6
    assert hub.sent_bytes == 0


@pytest.mark.parametrize(
    "path", ["", "/m", "/m/manifest", "/m/header", "/m/backbone", f"/m/slice?segments={CHOSEN}"]
)
def test_every_call_needs_a_token_of_the_right_role(hub: SmallHub, path: str) -> None:
    assert get(hub, f"/v1/models{path}", "wrong").status_code == 401
    assert get(hub, f"/v1/models{path}", "gateway-token").status_code == 403
    assert get(hub, f"/v1/models{path}", "backbone-token").status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2e%2e",
        "..%2f..%2fetc",
        "%2fetc%2fpasswd",
        "m%2f..%2fm",
        "m%00",
        ".adding-m",
        ".removed-m",
        "-m",
        "a" * 65,
        "m\\..\\m",
        "other",
    ],
)
def test_a_name_is_never_a_path(hub: SmallHub, folder: Path, name: str) -> None:
    (folder.parent / "entry.json").write_bytes((folder / "m" / "entry.json").read_bytes())
    (folder / ".adding-m").mkdir()
    for call in ("", "/manifest", "/header", "/backbone", f"/slice?segments={CHOSEN}"):
        assert get(hub, f"/v1/models/{name}{call}").status_code in (404, 422)


@pytest.mark.parametrize(
    "segments",
    ["", "x", "0", "0:99", "99:0", "0:3-1", ";", "0:0;", "0:0-3;all", "0:" + "0," * 3500, "all:-1"],
)
def test_segments_that_are_not_there_are_refused_in_words(hub: SmallHub, segments: str) -> None:
    for call in ("slice", "manifest"):
        assert get(hub, f"/v1/models/m/{call}?segments={segments}").status_code == 422
    for part in ("0", "2", "-1", "x", "9" * 30):
        assert get(hub, f"/v1/models/m/backbone?part={part}").status_code in (404, 422)


def test_more_downloads_than_the_hub_takes_on_are_told_to_come_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SmallHub(folder, most=2, max_per_machine=2) as hub:
        opened = [begin_download(hub) for _ in range(2)]
        answer = get(hub, SLICE)
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert answer.json()["code"] == "too_many_downloads"
        opened[0].close()
        wait_until(lambda: hub.downloads.running_count == 1)
        assert get(hub, SLICE).status_code == 200
        opened[1].close()


def test_who_takes_nothing_is_left_and_costs_no_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "STALL_SECONDS", 0.3)
    with SmallHub(folder) as hub:
        connection = begin_download(hub)
        wait_until(lambda: hub.downloads.running_count == 0)
        # What was not taken was not read either.
        assert hub.sent_bytes < 16 * streaming.PIECE_BYTES
        connection.close()


def test_a_revoked_machines_download_ends(folder: Path) -> None:
    with SmallHub(folder) as hub:
        connection = begin_download(hub)
        assert hub.downloads.running_count == 1
        hub.call_in_loop(hub.downloads.end_all_of, "node")
        wait_until(lambda: hub.downloads.running_count == 0)
        connection.close()


@contextlib.contextmanager
def held_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], threading.Event]]:
    """Hold every plan of a slice until the event is set; gives what was asked for, too."""
    asked: list[str] = []
    go_on = threading.Event()
    plan = Library.slice

    def held(library: Library, name: str, segments: str) -> Content:
        asked.append(segments)
        assert go_on.wait(60)
        return plan(library, name, segments)

    monkeypatch.setattr(Library, "slice", held)
    try:
        yield asked, go_on
    finally:
        go_on.set()


def test_a_machine_that_is_revoked_while_its_slice_is_planned_is_sent_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        SmallHub(folder) as hub,
        held_plans(monkeypatch) as (asked, go_on),
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(get, hub, SLICE)
        wait_until(lambda: bool(asked))
        hub.call_in_loop(hub.downloads.end_all_of, "node")
        go_on.set()
        assert (answer.result().status_code, answer.result().json()["code"]) == (403, "revoked")
        assert hub.downloads.sent_bytes == 0


def test_no_more_slices_are_planned_than_downloads_may_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        SmallHub(folder, max_per_machine=1) as hub,
        held_plans(monkeypatch) as (asked, go_on),
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(get, hub, SLICE)
        wait_until(lambda: bool(asked))
        second = get(hub, "/v1/models/m/slice?segments=0:0")
        assert (second.status_code, second.json()["code"]) == (503, "too_many_downloads")
        assert asked == [CHOSEN]
        go_on.set()
        assert first.result().status_code == 200


@pytest.mark.parametrize("change", ["touched", "shorter", "gone"])
def test_a_file_that_was_changed_is_not_served(change: str, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(qwen3moe().read_bytes())
    add(tmp_path / "models", model)
    if change == "gone":
        model.unlink()
    elif change == "shorter":
        with model.open("r+b") as file:
            file.truncate(1000)
    else:
        with model.open("r+b") as file:
            file.seek(10**7)
            file.write(b"other")
    with SmallHub(tmp_path / "models") as hub:
        for path in (SLICE, "/v1/models/m/backbone"):
            answer = get(hub, path)
            assert answer.status_code == 409
            assert answer.json()["code"] == "model_changed"
        assert get(hub, "/v1/models/m").json()["problem"]
        assert get(hub, "/v1/models").json()["models"][0]["problem"]


def test_a_file_that_is_changed_meanwhile_breaks_the_download_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(qwen3moe().read_bytes())
    add(tmp_path / "models", model)
    with SmallHub(tmp_path / "models") as hub:
        headers = {"Authorization": "Bearer node-token"}
        taken = b""
        with (
            httpx.stream(
                "GET", f"{hub.url}/v1/models/m/slice?segments=all:all", headers=headers
            ) as answer,
            pytest.raises(httpx.RemoteProtocolError),
        ):
            for piece in answer.iter_raw():
                taken += piece
                if model.stat().st_size:
                    model.write_bytes(b"")
        assert answer.status_code == 200
        fresh = cut(qwen3moe(), tmp_path / "slice.gguf", "all:all").path.read_bytes()
        assert len(taken) < len(fresh)
        assert fresh.startswith(taken)


def begin_download(hub: SmallHub) -> socket.socket:
    """Ask for a lot, take little, and wait until the hub has noticed."""
    before = hub.downloads.running_count
    host, port = hub.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connection.sendall(
        b"GET /v1/models/m/slice?segments=all:all HTTP/1.1\r\nHost: x\r\n"
        b"Authorization: Bearer node-token\r\n\r\n"
    )
    wait_until(lambda: hub.downloads.running_count == before + 1)
    return connection


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(3000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it never became so")


@pytest.mark.slow
def test_many_read_at_once_and_each_gets_all(hub: SmallHub) -> None:
    expected = get(hub, SLICE).content
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(get(hub, SLICE).content)) for _ in range(7)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 7
    # A client has the last byte a moment before the hub has counted the download as ended.
    wait_until(lambda: hub.downloads.running_count == 0)
