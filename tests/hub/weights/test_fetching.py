"""A hub's model from the machine that takes part of it: checked, resumed, and nothing too much."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.hub.weights.catalogue import Catalogue
from linkcpp.model import web_source
from linkcpp.model.slices.manifest import read_manifest
from linkcpp.model.slices.segments import Segment, parse_segment
from linkcpp.model.slices.slabs import ExpertSlabs
from linkcpp.model.slices.target import Target
from linkcpp.model.slices.verifying import verify_file
from linkcpp.model.slices.writing import WrittenFile, choose_segments, write_backbone, write_slice
from linkcpp.registry.hub_model import HubAccess, HubModel
from tests.hub.weights.small_hub import SmallHub, add
from tests.hub.weights.test_streams import split_model
from tests.model.test_backbone import emptied
from tests.model.test_slices import cut, flip
from tests.model.web_server import Handler, Server, asked_range, send
from tests.support.models import llama, qwen3moe

CHOSEN = ("0:0-3", "2:4-9")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_source, "HUB_RETRY_PAUSES_SECONDS", (0.01,) * 20)
    monkeypatch.setattr(web_source, "RETRY_PAUSES_SECONDS", (0.01,) * 3)


transferred: list[int] = []


def fetch(
    hub: SmallHub,
    output: Path,
    *texts: str,
    access: HubAccess | None = None,
    url: str | None = None,
    on_progress: object = lambda _: None,
) -> tuple[WrittenFile, int]:
    """Fetch a slice; tells also what came over the network for it."""
    cache = output.parent
    with HubModel(access or hub.access(), "m", url=url, cache=cache) as model:
        chosen = choose_segments(model.files, [parse_segment(text) for text in texts or CHOSEN])
        supply_of = model.slice_supply(chosen)
        try:
            written = write_slice(model.files, chosen, output, on_progress, supply_of)  # type: ignore[arg-type]
        finally:
            transferred.append(model.transferred_bytes)
        return written, transferred[-1]


def header_bytes(folder: Path) -> int:
    return Catalogue(folder).entry("m").model.parts[0].header_bytes


def test_a_slice_comes_with_its_header_and_hashes_and_no_other_weights(
    hub: SmallHub, folder: Path, tmp_path: Path
) -> None:
    here = cut(qwen3moe(), tmp_path / "here.gguf", *CHOSEN)
    written, transferred = fetch(hub, tmp_path / "s.gguf")
    assert written.path.read_bytes() == here.path.read_bytes()
    assert verify_file(written.path, lambda _: None).is_sound
    assert transferred == hub.sent_bytes
    by_kind = {kind: sum(n for k, n in hub.sent if k == kind) for kind, _ in hub.sent}
    assert by_kind["slice"] == here.copied_bytes
    assert by_kind["header"] == header_bytes(folder)
    # What the hub tells of the model, and a hash for each slab with the byte that asks for a size.
    assert by_kind["m"] < 2000
    assert by_kind["manifest"] <= here.manifest.stat().st_size + 1


def test_a_stopped_fetch_goes_on_and_takes_nothing_twice(hub: SmallHub, tmp_path: Path) -> None:
    output = tmp_path / "s.gguf"
    texts = ("all:0-11",)
    here = cut(qwen3moe(), tmp_path / "here.gguf", *texts)
    whole = here.copied_bytes
    transferred.clear()

    class StopError(Exception):
        pass

    for share in (4, 3, 2):
        done = 0

        def stop(more_bytes: int, most: int = whole // share) -> None:
            nonlocal done
            done += more_bytes
            if done > most:
                raise StopError

        with pytest.raises(StopError):
            fetch(hub, output, *texts, on_progress=stop)
    # Not even a journal is needed: the hashes of the hub say what is there.
    journal = Target(output).journal
    journal.write_bytes(journal.read_bytes().partition(b"\n")[0] + b"\n")
    written, _ = fetch(hub, output, *texts)
    assert written.path.read_bytes() == here.path.read_bytes()
    header_and_hashes = sum(size for kind, size in hub.sent if kind != "slice")
    # Of each of three attempts one unfinished slab a thread is lost, and read once more.
    assert sum(transferred) <= whole + header_and_hashes + 3 * 4 * tensor_slab(written)
    # The header and the hashes are kept as well.
    assert sum(1 for kind, size in hub.sent if kind == "header" and size) == 1
    assert sum(1 for kind, size in hub.sent if kind == "manifest" and size) == 2


def tensor_slab(written: WrittenFile) -> int:
    return max(tensor.slab_bytes for tensor in read_manifest(written.path).tensors)


def test_what_is_on_the_disk_is_checked_before_it_is_used(hub: SmallHub, tmp_path: Path) -> None:
    output = tmp_path / "s.gguf"

    def stop(_: int) -> None:
        if Target(output).partial.stat().st_blocks * 512 > 1_500_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(hub, output, on_progress=stop)
    size = Target(output).partial.stat().st_size
    for at in range(4096, size, 50_000):
        flip(Target(output).partial, at)
    written, _ = fetch(hub, output)
    assert (
        written.path.read_bytes() == cut(qwen3moe(), tmp_path / "h.gguf", *CHOSEN).path.read_bytes()
    )


def test_a_slab_that_came_damaged_is_asked_for_once_more(hub: SmallHub, tmp_path: Path) -> None:
    hub.damage["slice"] = 1
    here = cut(qwen3moe(), tmp_path / "here.gguf", *CHOSEN)
    written, _ = fetch(hub, tmp_path / "s.gguf")
    assert written.path.read_bytes() == here.path.read_bytes()
    again = sum(size for kind, size in hub.sent if kind == "slice") - here.copied_bytes
    assert again in {tensor.slab_bytes for tensor in read_manifest(here.path).tensors}


def test_a_slab_that_stays_wrong_is_named_with_where_it_came_from(
    folder: Path, tmp_path: Path
) -> None:
    # The file rots without the file system's noticing: same size, same time.
    model = tmp_path / "model.gguf"
    model.write_bytes(qwen3moe().read_bytes())
    add(tmp_path / "rotten", model)
    with HubModelFile(model) as file:
        name, expert = file.spoil(layer=2, expert=5)
    with SmallHub(tmp_path / "rotten") as hub:
        with pytest.raises(LinkcppError) as error:
            fetch(hub, tmp_path / "s.gguf")
        assert f"expert {expert} of {name}" in str(error.value)
        assert hub.url in str(error.value)
        assert "twice" in str(error.value)
        assert not (tmp_path / "s.gguf").exists()
        # All others came once, that one twice.
        weights = sum(size for kind, size in hub.sent if kind == "slice")
        here = cut(qwen3moe(), tmp_path / "here.gguf", *CHOSEN)
        assert weights <= here.copied_bytes + tensor_slab(here)


class HubModelFile:
    """A model's file that is damaged behind the back of its time of change."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "HubModelFile":
        self._status = self._path.stat()
        return self

    def spoil(self, layer: int, expert: int) -> tuple[str, int]:
        segments = [Segment(layer=layer, first=expert, last=expert)]
        with ExpertSlabs(self._path, segments) as slabs:
            slab = next(iter(slabs))
        flip(self._path, slab.offset_bytes + 10)
        return slab.tensor.name, expert

    def __exit__(self, *_: object) -> None:
        os.utime(self._path, ns=(self._status.st_atime_ns, self._status.st_mtime_ns))


def test_the_models_own_address_is_asked_and_the_hub_only_for_hashes(
    web: Server, tmp_path: Path
) -> None:
    web.files["/m.gguf"] = qwen3moe().read_bytes()
    add(tmp_path / "models", f"{web.url}/m.gguf")
    before = web.sent_bytes
    here = cut(qwen3moe(), tmp_path / "here.gguf", *CHOSEN)
    with SmallHub(tmp_path / "models") as hub:
        written, transferred = fetch(hub, tmp_path / "s.gguf")
        assert written.path.read_bytes() == here.path.read_bytes()
        # Not even the header comes from there.
        assert web.sent_bytes - before == here.copied_bytes
        assert {kind for kind, _ in hub.sent} == {"m", "header", "manifest"}
        assert transferred == here.copied_bytes + hub.sent_bytes
        assert not any("node-token" in str(headers) for _, headers in web.seen)


@pytest.mark.parametrize("trouble", ["wrong bytes", "another file", "gone", "down"])
def test_where_one_place_fails_the_other_one_gives_the_slabs(
    trouble: str, hub: SmallHub, web: Server, tmp_path: Path
) -> None:
    content = bytearray(qwen3moe().read_bytes())
    here = cut(qwen3moe(), tmp_path / "here.gguf", *CHOSEN)
    url = f"{web.url}/m.gguf"
    if trouble == "wrong bytes":
        for at in range(len(content) // 2, len(content), 100_000):
            content[at] ^= 1
        web.files["/m.gguf"] = bytes(content)
    elif trouble == "another file":
        web.files["/m.gguf"] = bytes(content[:-100])
    elif trouble == "down":
        web.answers["/m.gguf"] = lambda handler, _: send(handler, 500, b"")
    written, _ = fetch(hub, tmp_path / "s.gguf", url=url)
    assert written.path.read_bytes() == here.path.read_bytes()
    weights = sum(size for kind, size in hub.sent if kind == "slice")
    assert 0 < weights <= here.copied_bytes
    if trouble == "wrong bytes":
        assert weights < here.copied_bytes


def test_a_token_that_ran_out_is_taken_anew(hub: SmallHub, tmp_path: Path) -> None:
    asked = []
    hub.tokens["second-token"] = hub.tokens["node-token"]

    def token() -> str:
        asked.append(1)
        if len(asked) == 4:
            del hub.tokens["node-token"]
        return "second-token" if len(asked) > 5 else "node-token"

    written, _ = fetch(hub, tmp_path / "s.gguf", access=HubAccess(hub.url, token))
    assert verify_file(written.path, lambda _: None).is_sound


@pytest.mark.slow
def test_a_busy_hub_is_waited_for(folder: Path, tmp_path: Path) -> None:
    with SmallHub(folder, most=1, max_per_machine=1) as hub:
        written, _ = fetch(hub, tmp_path / "s.gguf", "all:all")
        assert verify_file(written.path, lambda _: None).is_sound


def test_a_hub_that_starts_again_in_between_loses_nothing(folder: Path, tmp_path: Path) -> None:
    hub = SmallHub(folder)
    url = hub.url
    with hub:
        started = threading.Event()

        def note(_: int) -> None:
            started.set()

        result: list[object] = []

        def work() -> None:
            try:
                result.append(fetch(hub, tmp_path / "s.gguf", "all:all", on_progress=note))
            except Exception as error:
                result.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert started.wait(30)
    port = int(url.rpartition(":")[2])
    with SmallHub(folder, port=port):
        thread.join(60)
    assert isinstance(result[0], tuple), result
    assert verify_file(tmp_path / "s.gguf", lambda _: None).is_sound


def test_a_hub_with_another_header_or_without_the_model_is_refused(
    hub: SmallHub, folder: Path, tmp_path: Path
) -> None:
    header = folder / "m" / "header-00001"
    whole = header.read_bytes()
    header.write_bytes(whole.replace(b"tiny-qwen3moe", b"evil-qwen3moe"))
    with pytest.raises(LinkcppError, match="is damaged"):
        fetch(hub, tmp_path / "s.gguf")
    header.write_bytes(whole)
    with pytest.raises(LinkcppError, match="no model 'other'"), HubModel(hub.access(), "other"):
        pass
    with pytest.raises(LinkcppError, match="needs a token"), HubModel(hub.access("x"), "m"):
        pass


def fetch_backbone(
    access: HubAccess, output: Path, on_progress: Callable[[int], None] = lambda _: None
) -> list[WrittenFile]:
    with HubModel(access, "m") as model:
        return write_backbone(model.files, output, on_progress, model.backbone_supply())


@pytest.mark.parametrize("kind", ["one file", "split", "dense"])
def test_a_hollow_backbone_comes_without_its_holes(kind: str, tmp_path: Path) -> None:
    made = {"one file": qwen3moe, "dense": llama}
    model = made[kind]() if kind in made else split_model(tmp_path / "model")
    entry = add(tmp_path / "models", model)
    done: list[int] = []
    with SmallHub(tmp_path / "models") as hub:
        access = hub.access("backbone-token")
        written = fetch_backbone(access, tmp_path / "b.gguf", done.append)
        assert [file.path.read_bytes() for file in written] == emptied(model)
        copied = sum(part.backbone_bytes for part in entry.model.parts)
        assert sum(done) == copied
        assert sum(size for path, size in hub.sent if path == "backbone") == copied
    assert all(verify_file(file.path, lambda _: None).is_sound for file in written)


def test_a_backbone_that_was_begun_goes_on_and_is_checked(hub: SmallHub, tmp_path: Path) -> None:
    output = tmp_path / "b.gguf"
    done = 0

    def stop(more_bytes: int) -> None:
        nonlocal done
        done += more_bytes
        if done > 3_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_backbone(hub.access("backbone-token"), output, stop)
    first = sum(size for path, size in hub.sent if path == "backbone")
    hub.damage["backbone"] = 1
    (written,) = fetch_backbone(hub.access("backbone-token"), output)
    assert [written.path.read_bytes()] == emptied(qwen3moe())
    assert written.reused_bytes > 1_000_000
    second = sum(size for path, size in hub.sent if path == "backbone") - first
    assert second < written.copied_bytes


def test_a_backbone_from_the_web_takes_only_hashes_from_the_hub(
    web: Server, tmp_path: Path
) -> None:
    web.files["/m.gguf"] = qwen3moe().read_bytes()
    entry = add(tmp_path / "models", f"{web.url}/m.gguf")
    before = web.sent_bytes
    with SmallHub(tmp_path / "models") as hub:
        (written,) = fetch_backbone(hub.access(), tmp_path / "b.gguf")
        assert {kind for kind, _ in hub.sent} == {"m", "header", "manifest"}
    assert [written.path.read_bytes()] == emptied(qwen3moe())
    assert web.sent_bytes - before == entry.model.parts[0].backbone_bytes


def test_a_lying_hub_cannot_make_a_machine_take_more_than_it_asked_for(
    web: Server, folder: Path, tmp_path: Path
) -> None:
    with SmallHub(folder) as hub:
        record = httpx.get(f"{hub.url}/v1/models/m", headers={"Authorization": "Bearer node-token"})

    def answer(content: bytes) -> object:
        def serve(handler: Handler, _: bytes) -> None:
            first, last = asked_range(handler)
            body = content[first : last + 1]
            send(handler, 206, body, Content_Range=f"bytes {first}-{last}/{len(content)}")

        return serve

    def endless(handler: Handler, _: bytes) -> None:
        first, last = asked_range(handler)
        total = 2**40
        send(handler, 206, b"x" * (last + 1 - first), Content_Range=f"bytes {first}-{last}/{total}")

    web.answers["/v1/models/m"] = answer(record.content)  # type: ignore[assignment]
    web.answers["/v1/models/m/header"] = endless
    with pytest.raises(LinkcppError), HubModel(HubAccess(web.url, lambda: "x"), "m"):
        pass
    web.answers["/v1/models/m"] = endless
    with (
        pytest.raises(LinkcppError, match="cannot be"),
        HubModel(HubAccess(web.url, lambda: "x"), "m"),
    ):
        pass
    assert web.sent_bytes < 10**5
