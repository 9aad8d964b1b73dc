"""Slices from a web server: only the header and the wanted bytes, over connections that break."""

import threading
import time
from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.model import web_source
from linkcpp.model.cursor import FIRST_CHUNK_BYTES
from linkcpp.model.slices.slabs import ExpertSlabs
from linkcpp.model.slices.unit_threads import THREADS
from linkcpp.model.slices.writing import open_whole_model, write_backbone
from tests.model import random_models as drawn
from tests.model.test_slices import cut, slabs_by_gguf
from tests.model.web_server import Handler, Server, asked_range, send, send_range
from tests.support.models import qwen35moe

CHOSEN = ("1-2:0-5", "3:2,4-6")


@pytest.fixture
def model_url(server: Server) -> str:
    server.files["/repo/model.gguf"] = qwen35moe().read_bytes()
    return f"{server.url}/repo/model.gguf"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_source, "RETRY_PAUSES_SECONDS", (0.01, 0.01, 0.01))


def answer_units(server: Server, answer: object) -> None:
    """Serve the size and the header well, and leave what follows to ``answer``."""

    def choose(handler: Handler, data: bytes) -> None:
        first, _ = asked_range(handler)
        if first < FIRST_CHUNK_BYTES:
            send_range(handler, data)
        else:
            answer(handler, data)  # type: ignore[operator]

    server.answers["/repo/model.gguf"] = choose


def test_only_the_header_and_the_wanted_slabs_are_fetched(
    server: Server, model_url: str, tmp_path: Path
) -> None:
    here = cut(qwen35moe(), tmp_path / "here.gguf", *CHOSEN)
    there = cut(model_url, tmp_path / "there.gguf", *CHOSEN)
    # One byte asks for the size; the header is read in one chunk.
    assert server.sent_bytes == there.copied_bytes + FIRST_CHUNK_BYTES + 1 + 32
    assert there.source_bytes == server.sent_bytes
    assert slabs_by_gguf(there.path) == slabs_by_gguf(here.path)


def test_a_split_model_is_sliced_from_its_url(server: Server, tmp_path: Path) -> None:
    layer = drawn.Layer(6, drawn.FUSED, ("Q4_K", "F16"), 256, 4, ("bias", "scale"))
    path = drawn.Model((layer,) * 3, files=3, seed=1).write(tmp_path)
    for part in tmp_path.glob("model-*.gguf"):
        server.files[f"/{part.name}"] = part.read_bytes()
    here = cut(path, tmp_path / "here.gguf", "0-2:1-4")
    there = cut(f"{server.url}/{path.name}", tmp_path / "there.gguf", "0-2:1-4")
    assert there.path.read_bytes() == here.path.read_bytes()


def test_a_dropped_connection_is_taken_up_where_it_broke(
    server: Server, model_url: str, tmp_path: Path
) -> None:
    def break_off(handler: Handler, data: bytes) -> None:
        first, last = asked_range(handler)
        sent = data[first : last + 1][:70_000]
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        handler.send_header("Content-Length", str(last - first + 1))
        handler.end_headers()
        handler.wfile.write(sent)
        with server.counting:
            server.sent_bytes += len(sent)
        handler.close_connection = True

    answer_units(server, break_off)
    here = cut(qwen35moe(), tmp_path / "here.gguf", *CHOSEN)
    there = cut(model_url, tmp_path / "there.gguf", *CHOSEN)
    assert there.path.read_bytes() == here.path.read_bytes()
    # Nothing that had arrived was fetched again.
    assert server.sent_bytes == there.source_bytes


def test_a_busy_server_is_asked_again(server: Server, model_url: str, tmp_path: Path) -> None:
    refused: set[str] = set()

    def refuse_once(handler: Handler, data: bytes) -> None:
        with server.counting:
            is_first = handler.headers["Range"] not in refused
            refused.add(handler.headers["Range"])
        if is_first:
            send(handler, 503, b"")
        else:
            send_range(handler, data)

    answer_units(server, refuse_once)
    cut(model_url, tmp_path / "s.gguf", *CHOSEN)
    assert refused


def test_a_server_that_stays_away_is_named_and_the_next_attempt_goes_on(
    server: Server, model_url: str, tmp_path: Path
) -> None:
    served = 0

    def serve_three(handler: Handler, data: bytes) -> None:
        nonlocal served
        with server.counting:
            served += 1
            is_served = served <= 3
        if is_served:
            send_range(handler, data)
        else:
            handler.close_connection = True

    answer_units(server, serve_three)
    output = tmp_path / "s.gguf"
    with pytest.raises(LinkcppError, match="Cannot read http"):
        cut(model_url, output, *CHOSEN)
    assert not output.exists()
    answer_units(server, send_range)
    written = cut(model_url, output, *CHOSEN)
    assert written.reused_bytes > 0
    assert written.fetched_bytes + written.reused_bytes == written.copied_bytes
    assert (
        output.read_bytes() == cut(qwen35moe(), tmp_path / "here.gguf", *CHOSEN).path.read_bytes()
    )


def test_a_server_that_ignores_ranges_is_refused(
    server: Server, model_url: str, tmp_path: Path
) -> None:
    answer_units(server, lambda handler, data: send(handler, 200, data))
    with pytest.raises(LinkcppError, match="does not serve ranges"):
        cut(model_url, tmp_path / "s.gguf", *CHOSEN)


def test_a_file_that_changes_meanwhile_is_refused(
    server: Server, model_url: str, tmp_path: Path
) -> None:
    def changed(handler: Handler, data: bytes) -> None:
        first, last = asked_range(handler)
        where = f"bytes {first}-{last}/{len(data)}"
        tag = '"old"' if first < FIRST_CHUNK_BYTES else '"new"'
        send(handler, 206, data[first : last + 1], Content_Range=where, ETag=tag)

    server.answers["/repo/model.gguf"] = changed
    with pytest.raises(LinkcppError, match="changed while it was read"):
        cut(model_url, tmp_path / "s.gguf", *CHOSEN)


def test_few_requests_run_at_one_time(server: Server, model_url: str, tmp_path: Path) -> None:
    together = threading.Barrier(THREADS)

    def wait_for_others(handler: Handler, data: bytes) -> None:
        # The server sees all threads at once, and nobody besides them.
        together.wait(timeout=120)
        time.sleep(0.02)
        send_range(handler, data)

    answer_units(server, wait_for_others)
    cut(model_url, tmp_path / "s.gguf", "0-3:0-3")
    assert server.most_busy == THREADS


def test_a_backbone_comes_without_the_experts(
    server: Server, model_url: str, tmp_path: Path
) -> None:
    with open_whole_model(model_url) as files:
        (written,) = write_backbone(files, tmp_path / "b.gguf", lambda _: None)
    experts = sum(len(data) for data in slabs_by_gguf(qwen35moe()).values())
    assert server.sent_bytes < qwen35moe().stat().st_size - experts + 2 * FIRST_CHUNK_BYTES
    assert written.copied_bytes == qwen35moe().stat().st_size - experts


def test_slabs_are_read_from_a_url_without_a_file(server: Server, model_url: str) -> None:
    with ExpertSlabs(model_url) as there, ExpertSlabs(qwen35moe()) as here:
        slab = next(iter(there))
        assert there.read(slab.tensor, 3, 5, 100) == here.read(slab.tensor, 3, 5, 100)
        assert there.model_digest == here.model_digest
