"""Models of a hub: hashed once, resumed, wholly there or not at all, never under a path's name."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.hub.identity import load_hub_identity
from linkcpp.hub.weights.adding import Addition, add_model, name_for
from linkcpp.hub.weights.catalogue import Catalogue, Entry, models_folder
from linkcpp.hub.weights.library import Library
from linkcpp.model.expert_tensors import is_expert_weight
from linkcpp.model.parts import open_model
from linkcpp.model.slices.model_manifest import ModelManifest
from linkcpp.model.slices.verifying import verify_file
from linkcpp.model.slices.writing import open_whole_model, write_backbone
from tests.hub.weights.small_hub import SmallHub, add, no_bar
from tests.hub.weights.test_streams import get, split_model
from tests.model.test_slice_memory import sparse_model
from tests.model.test_slices import flip
from tests.model.web_server import Handler, Server, send_range
from tests.support.memory import peak_bytes
from tests.support.models import in_hub_cache, llama, llama_parts, qwen3moe


def manifest_of(folder: Path, name: str = "m") -> ModelManifest:
    content = Library(Catalogue(folder)).manifest(name, packed=False)
    (piece,) = content.layout.pieces(0, content.layout.size_bytes, 2**30)
    return ModelManifest.model_validate_json(piece[0].content or b"")


@pytest.mark.slow
@pytest.mark.parametrize("is_split", [False, True])
def test_the_manifest_has_the_hash_of_every_slab_and_of_all_other_bytes(
    is_split: bool, tmp_path: Path
) -> None:
    model = split_model(tmp_path / "model") if is_split else qwen3moe()
    entry = add(tmp_path / "models", model)
    manifest = manifest_of(tmp_path / "models")
    hashes = {tensor.name: tensor for tensor in manifest.tensors}
    with open_model(model) as files:
        assert entry.model.digest == manifest.model.digest == files.digest
        for part, source in zip(manifest.parts, files.sources, strict=True):
            for span in part.spans:
                content = source.read(span.offset_bytes, span.size_bytes)
                assert hashlib.sha256(content).hexdigest() == span.sha256
        covered = sum(part.backbone_bytes for part in manifest.parts)
        for file, tensor in files.tensors:
            # No piece has bytes of two tensors.
            starts = {span.offset_bytes for span in manifest.parts[file].spans}
            assert is_expert_weight(tensor.name) or tensor.offset_bytes in starts
            if "_exps" not in tensor.name:
                continue
            found = hashes.pop(tensor.name)
            for expert, digest in enumerate(found.sha256):
                at = tensor.offset_bytes + expert * found.slab_bytes
                content = files.sources[file].read(at, found.slab_bytes)
                assert hashlib.sha256(content).hexdigest() == digest
            covered += tensor.size_bytes if is_expert_weight(tensor.name) else 0
        assert not hashes
        assert covered == files.file_bytes


def counting(counted: list[int], stop_after: int | None = None) -> object:
    """A progress bar that counts what is hashed, and is Ctrl-C at some point."""

    @contextlib.contextmanager
    def bar(step: str, total_bytes: int) -> Iterator[object]:
        def count(done_bytes: int) -> None:
            counted.append(done_bytes)
            if stop_after is not None and sum(counted) > stop_after:
                raise KeyboardInterrupt

        yield count

    return bar


def test_ctrl_c_loses_little_and_the_same_command_goes_on(tmp_path: Path) -> None:
    model, catalogue = qwen3moe(), Catalogue(tmp_path / "models")
    wanted = Addition(str(model), "m", copies=False, unix_time=0)
    with pytest.raises(KeyboardInterrupt):
        add_model(catalogue, wanted, counting([], 12 * 10**6))  # type: ignore[arg-type]
    assert catalogue.names() == []
    with open_model(model) as files:
        read: list[int] = []
        opened = type(files.sources[0]).stream

    def stream(self: object, offset: int, length: int) -> Iterator[memoryview]:
        read.append(length)
        return opened(self, offset, length)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linkcpp.model.source.FileSource.stream", stream)
        entry = add_model(catalogue, wanted, no_bar)  # type: ignore[arg-type]
    assert sum(read) < entry.model.file_bytes * 3 // 4
    add(tmp_path / "fresh", model)
    assert manifest_of(tmp_path / "models") == manifest_of(tmp_path / "fresh")


def test_what_was_hashed_of_another_state_of_the_file_is_not_used(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(qwen3moe().read_bytes())
    catalogue = Catalogue(tmp_path / "models")
    wanted = Addition(str(model), "m", copies=False, unix_time=0)
    with pytest.raises(KeyboardInterrupt):
        add_model(catalogue, wanted, counting([], 12 * 10**6))  # type: ignore[arg-type]
    for at in range(20_000, model.stat().st_size, 500_000):
        flip(model, at)
    add_model(catalogue, wanted, no_bar)  # type: ignore[arg-type]
    add(tmp_path / "fresh", model)
    assert manifest_of(tmp_path / "models") == manifest_of(tmp_path / "fresh")


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_no_half_model(tmp_path: Path) -> None:
    data, model = tmp_path / "hub", qwen3moe()
    catalogue = Catalogue(data / "models")
    command = verb("add", str(model), "--name", "m", "--data", str(data))
    journal = catalogue.begun_folder("m") / "hashes.journal"
    for lines in (1, 2, 4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (
            journal.exists() and journal.read_bytes().count(b"\n") > lines
        ):
            pass
        process.kill()
        process.wait()
        for name in catalogue.names():
            assert Library(catalogue).slice(name, "all:all").layout.size_bytes
    subprocess.run(command, check=False, capture_output=True)
    assert [entry.model.name for entry in catalogue.entries()] == ["m"]
    add(tmp_path / "fresh", model)
    assert manifest_of(data / "models") == manifest_of(tmp_path / "fresh")


class KilledError(BaseException):
    """Stands for SIGKILL: nothing of the catalogue catches it."""


@pytest.mark.parametrize("step", range(5))
def test_a_kill_while_it_is_put_into_the_catalogue_leaves_all_or_nothing(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter(range(5))

    def killed_at(call: object) -> object:
        def run(*arguments: object, **options: object) -> object:
            if next(steps) == step:
                raise KilledError
            return call(*arguments, **options)  # type: ignore[operator]

        return run

    model, catalogue = qwen3moe(), Catalogue(tmp_path / "models")
    with monkeypatch.context() as patch:
        for name in ("write_atomically", "_sync"):
            module = "linkcpp.hub.weights.catalogue"
            patch.setattr(f"{module}.{name}", killed_at(getattr(sys.modules[module], name)))
        with pytest.raises(KilledError):
            add(tmp_path / "models", model)
    # The last step is after the rename: then it is there.
    assert catalogue.names() == (["m"] if step == 4 else [])
    if step < 4:
        add(tmp_path / "models", model)
    assert Library(catalogue).slice("m", "all:all").layout.size_bytes


def test_a_model_from_the_web_is_read_once_and_only_its_hashes_are_kept(
    web: Server, tmp_path: Path
) -> None:
    web.files["/m.gguf"] = qwen3moe().read_bytes()
    entry = add(tmp_path / "models", f"{web.url}/m.gguf?key=secret", "m")
    assert web.sent_bytes < entry.model.file_bytes * 1.1
    assert entry.model.parts[0].url == f"{web.url}/m.gguf?key=secret"
    kept = sum(path.stat().st_size for path in (tmp_path / "models").rglob("*") if path.is_file())
    assert kept < entry.model.file_bytes // 50
    with SmallHub(tmp_path / "models") as hub:
        refused = get(hub, "/v1/models/m/slice?segments=0:0-1")
        assert refused.json()["code"] == "no_weights"
        assert get(hub, "/v1/models/m/manifest?segments=0:0-1").status_code == 200
        assert get(hub, "/v1/models/m/header").status_code == 200


@pytest.mark.parametrize("from_web", [False, True])
def test_a_copied_model_is_served_though_the_first_one_is_gone(
    from_web: bool, web: Server, tmp_path: Path
) -> None:
    model = split_model(tmp_path / "model")
    location = str(model)
    if from_web:
        for part in model.parent.iterdir():
            web.files[f"/{part.name}"] = part.read_bytes()
        location = f"{web.url}/{model.name}"
    content = b"".join(path.read_bytes() for path in sorted(model.parent.iterdir()))
    entry = add(tmp_path / "models", location, copies=True)
    for path in model.parent.iterdir():
        path.unlink()
    catalogue = Catalogue(tmp_path / "models")
    local = [file.path for file in catalogue.local_files(entry)]
    assert b"".join(path.read_bytes() for path in local) == content
    assert catalogue.problem(entry) is None
    with SmallHub(tmp_path / "models") as hub:
        assert get(hub, "/v1/models/m/slice?segments=all:0-1").status_code == 200
    catalogue.remove("m")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_copy_that_was_begun_goes_on(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "models")
    wanted = Addition(str(qwen3moe()), "m", copies=True, unix_time=0)
    for stop in (5 * 10**6, 30 * 10**6):
        with pytest.raises(KeyboardInterrupt):
            add_model(catalogue, wanted, counting([], stop))  # type: ignore[arg-type]
    entry = add_model(catalogue, wanted, no_bar)  # type: ignore[arg-type]
    assert catalogue.local_files(entry)[0].path.read_bytes() == qwen3moe().read_bytes()


def test_a_model_that_changes_while_it_is_hashed_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(qwen3moe().read_bytes())
    done = threading.Event()

    @contextlib.contextmanager
    def change(step: str, total_bytes: int) -> Iterator[object]:
        def once(done_bytes: int) -> None:
            if not done.is_set():
                done.set()
                flip(model, 10**7)

        yield once

    wanted = Addition(str(model), "m", copies=False, unix_time=0)
    with pytest.raises(LinkcppError, match="changed while it was read"):
        add_model(Catalogue(tmp_path / "models"), wanted, change)  # type: ignore[arg-type]
    assert Catalogue(tmp_path / "models").names() == []


def test_a_hollow_model_and_a_second_one_of_the_name_are_refused(tmp_path: Path) -> None:
    with open_whole_model(qwen3moe()) as files:
        (hollow,) = write_backbone(files, tmp_path / "b.gguf", lambda _: None)
    assert verify_file(hollow.path, lambda _: None).is_sound
    with pytest.raises(LinkcppError, match="is hollow"):
        add(tmp_path / "models", hollow.path)
    add(tmp_path / "models", qwen3moe())
    with pytest.raises(LinkcppError, match="There is a model m already"):
        add(tmp_path / "models", qwen3moe())
    with pytest.raises(LinkcppError, match="no model 'other'"):
        Catalogue(tmp_path / "models").remove("other")


def test_a_dense_model_has_no_slices_and_all_of_it_is_its_backbone(tmp_path: Path) -> None:
    add(tmp_path / "models", llama())
    with SmallHub(tmp_path / "models") as hub:
        assert get(hub, "/v1/models/m/backbone").content == llama().read_bytes()
        answer = get(hub, "/v1/models/m/slice?segments=all:all")
        assert (answer.status_code, answer.json()["code"]) == (422, "no_such_slice")


@pytest.mark.parametrize(
    "name", ["..", "../x", "/etc", "a/b", ".x", "-x", "", "a" * 65, "ä", "a\0"]
)
def test_names_that_could_be_paths_are_refused(name: str, tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "models")
    (tmp_path / "x").mkdir()
    for call in (catalogue.entry, catalogue.begin, catalogue.remove, catalogue.manifest):
        with pytest.raises(LinkcppError, match="A model's name has letters"):
            call(name)
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("/models/Qwen3.5-122B-Q4_K_M-00001-of-00003.gguf", "Qwen3.5-122B-Q4_K_M"),
        ("https://host/repo/my%20model.gguf?key=1#x", "my-model"),
        ("https://host/a%2f..%2f.hidden.gguf", "hidden"),
        ("model.gguf", "model"),
    ],
)
def test_a_name_is_made_of_the_files(location: str, name: str) -> None:
    assert name_for(location) == name


def verb(*words: str) -> list[str]:
    return [sys.executable, "-c", "from linkcpp.cli.hub_models import app; app()", *words]


def hub_models(data: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        verb(*words, "--data", str(data)),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def refused_verb(data: Path, *words: str) -> str:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        hub_models(data, *words)
    return str(refused.value.stderr)


@pytest.mark.slow
def test_the_verb_adds_lists_and_removes(web: Server, tmp_path: Path) -> None:
    load_hub_identity(tmp_path, create=True)
    web.files["/m.gguf"] = qwen3moe().read_bytes()
    hub_models(tmp_path, "add", str(qwen3moe()), "--name", "tiny")
    links = in_hub_cache(llama_parts(), tmp_path / "cache")
    hub_models(tmp_path, "add", str(links[2]), "--name", "split")
    hub_models(tmp_path, "add", f"{web.url}/m.gguf?key=s3cret")
    listed = hub_models(tmp_path, "list", "--json").stdout
    models = {model["name"]: model for model in json.loads(listed)["models"]}
    assert set(models) == {"tiny", "split", "m"}
    assert models["tiny"]["paths"] == [str(qwen3moe())]
    assert models["split"]["paths"] == [str(link) for link in links]
    assert models["m"]["has_weights"] is False
    assert "s3cret" not in listed
    assert "from the web" in hub_models(tmp_path, "list").stdout
    unknown = refused_verb(tmp_path, "remove", "tinny")
    assert "This hub has no model 'tinny'" in unknown
    assert "Did you mean tiny? `linkcpp hub models list`" in unknown
    assert "cannot be launched any more" in hub_models(tmp_path, "remove", "tiny").stdout
    assert "tiny" not in hub_models(tmp_path, "list").stdout
    assert qwen3moe().exists()


@pytest.mark.slow
def test_models_are_managed_on_the_hubs_machine_only(tmp_path: Path) -> None:
    load_hub_identity(tmp_path, create=True)
    there = ("--hub", "https://hub.example")
    add, remove = ("add", str(qwen3moe())), ("remove", "tiny")
    nothing_said = [subprocess.run(verb(*words), capture_output=True, text=True, check=False)
                    for words in (add, remove)]  # fmt: skip
    for done in nothing_said:
        assert done.returncode
        assert "on its own machine" in done.stderr
    for refused in (refused_verb(tmp_path, *words, *there) for words in (add, remove)):
        assert "on its own machine" in refused
        assert "Run the same there" in refused
    assert not (tmp_path / "models").exists()


@pytest.mark.slow
def test_a_folder_that_is_named_may_be_filled_before_its_hub_is_started(tmp_path: Path) -> None:
    data = tmp_path / "new" / "hub"
    begun = hub_models(data, "add", str(qwen3moe()), "--name", "tiny")
    assert f"`linkcpp hub --data {data}` serves it" in begun.stderr
    # As where the hub itself makes it: sources in it may have secrets in their addresses.
    assert data.stat().st_mode & 0o077 == 0
    load_hub_identity(data, create=True)
    assert "tiny" in hub_models(data, "list").stdout
    told = hub_models(data, "add", str(qwen3moe()), "--name", "two").stderr
    assert "serves it" not in told


def test_a_folder_that_is_none_or_anothers_is_told_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "models").touch()
    folders = [tmp_path / name for name in ("file", "file/in", "loop", "half")]
    for folder in (*folders, Path(os.devnull)):
        with pytest.raises(LinkcppError, match="is not a folder") as refused:
            Catalogue(models_folder(folder)).begin("m")
        assert refused.value.hint == "Name another folder with --data."
    unnamed = subprocess.run(
        verb("add", str(qwen3moe()), "--data", ""),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert "it names no folder" in unnamed.stderr
    assert not (tmp_path / "models").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can leave its rights for a moment")
@pytest.mark.parametrize("mode", [0o000, 0o100, 0o400, 0o500])
def test_a_folder_that_may_not_be_used_is_told_with_a_hint(mode: int) -> None:
    # pytest's own folders are root's alone, from the first one on.
    with tempfile.TemporaryDirectory() as name:
        data = Path(name)
        os.chown(data, 12345, 12345)
        data.chmod(mode)
        os.seteuid(12345)
        try:
            with pytest.raises(LinkcppError, match=r"/models cannot.*Permission denied") as refused:
                Catalogue(models_folder(data)).begin("m")
        finally:
            os.seteuid(0)
    assert refused.value.hint == "Name another folder with --data."


@pytest.mark.slow
def test_ctrl_c_at_the_verb_ends_it_at_once_though_the_web_does_not_answer(
    web: Server, tmp_path: Path
) -> None:
    load_hub_identity(tmp_path, create=True)
    content = qwen3moe().read_bytes()
    web.files["/m.gguf"] = content
    waiting, go_on = threading.Event(), threading.Event()

    def stall(handler: Handler, data: bytes) -> None:
        if len(web.seen) > 5:
            waiting.set()
            go_on.wait(60)
        with contextlib.suppress(ConnectionError):
            send_range(handler, data)

    web.answers["/m.gguf"] = stall
    process = subprocess.Popen(
        verb("add", f"{web.url}/m.gguf", "--data", str(tmp_path)),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.wait(30)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    go_on.set()
    assert process.returncode
    assert "goes on from here" in errors
    assert Catalogue(tmp_path / "models").names() == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model_or_the_number_of_downloads(tmp_path: Path) -> None:
    peaks = []
    for size, count in ((16 * 2**20, 1), (256 * 2**20, 6)):
        model = sparse_model(tmp_path / f"{count}.gguf", size, 2**20)
        with model.open("r+b") as file:
            # A weight that is not zero, or the model would be taken for a hollow one.
            file.seek(model.stat().st_size - size + 5000)
            file.write(b"\1" * 2**16)
        entry = add(tmp_path / str(count), model)
        peaks.append(peak_while_sending(tmp_path / str(count), entry, count))
    assert peaks[1] - peaks[0] < 24 * 2**20


SERVE = """
import sys, threading, time
from pathlib import Path
from tests.hub.weights.small_hub import SmallHub
with SmallHub(Path(sys.argv[1])) as hub:
    print(hub.url, flush=True)
    sys.stdin.read()
"""


def peak_while_sending(folder: Path, entry: Entry, count: int) -> int:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()

    def take() -> None:
        headers = {"Authorization": "Bearer node-token"}
        with httpx.stream(
            "GET", f"{url}/v1/models/m/slice?segments=all:all", headers=headers, timeout=60
        ) as answer:
            assert sum(map(len, answer.iter_raw())) > entry.model.file_bytes // 2

    threads = [threading.Thread(target=take) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peak = peak_bytes(process.pid)
    process.communicate("", timeout=30)
    return peak
