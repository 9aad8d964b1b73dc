"""What is left after a kill, Ctrl-C or a full disk, and how the next attempt goes on from it."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.model.slices.segments import parse_segment
from linkcpp.model.slices.target import Target
from linkcpp.model.slices.verifying import verify_file
from linkcpp.model.slices.writing import choose_segments, open_whole_model, write_slice
from tests.model import random_models as drawn
from tests.model.test_slices import cut, flip
from tests.model.web_server import Handler, Server, send_range
from tests.support.small_disk import small_disk

SERVED_BEFORE_THE_STALL = 12
LINES_IN_ALL = 24


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Six layers with two tensors of ten slabs each, 1.1 MB a tensor; two tasks a tensor."""
    layer = drawn.Layer(10, drawn.FUSED, ("Q8_0", "F16"), 512, 200, ())
    folder = tmp_path / "model"
    folder.mkdir()
    return drawn.Model((layer,) * 6, files=1, seed=3).write(folder)


@pytest.fixture
def stalling(server: Server, model: Path) -> Iterator[threading.Event]:
    """The model on a web server that stops answering until the event is set."""
    content = model.read_bytes()
    server.files["/model.gguf"] = content
    go_on = threading.Event()
    served = 0

    def stall(handler: Handler, data: bytes) -> None:
        nonlocal served
        with server.counting:
            served += 1
            must_wait = served > SERVED_BEFORE_THE_STALL
        if must_wait:
            go_on.wait(300)
        send_range(handler, data)

    server.answers["/model.gguf"] = stall
    yield go_on
    go_on.set()


WORDS = ("--layers", "all", "--experts", "0-3,6-9")


def start(server: Server, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "linkcpp.cli.main", "slice", f"{server.url}/model.gguf"]
    return subprocess.Popen(
        [*command, *WORDS, "-o", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_lines(process: subprocess.Popen[str], journal: Path, count: int) -> None:
    while not journal.exists() or journal.read_bytes().count(b"\n") <= count:
        assert process.poll() is None, process.communicate()[1]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_slice_goes_on_and_becomes_the_same_file(
    ending: signal.Signals, server: Server, stalling: threading.Event, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "s.gguf"
    target = Target(output)
    process = start(server, output)
    try:
        wait_for_lines(process, target.journal, 4)
        process.send_signal(ending)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    # SIGTERM ends a verb as Ctrl-C does; nothing can be done about SIGKILL.
    assert process.returncode == (-ending if ending == signal.SIGKILL else 130)
    assert not output.exists()
    assert target.partial.exists()
    if ending != signal.SIGKILL:
        assert "goes on from here" in errors
    stalling.set()
    sent_before = server.sent_bytes
    written = cut(f"{server.url}/model.gguf", output, "all:0-3,6-9")
    assert 0 < written.reused_bytes < written.copied_bytes
    assert written.fetched_bytes + written.reused_bytes == written.copied_bytes
    assert server.sent_bytes - sent_before < written.copied_bytes
    fresh = cut(model, tmp_path / "fresh.gguf", "all:0-3,6-9")
    assert output.read_bytes() == fresh.path.read_bytes()
    assert verify_file(output, lambda _: None).is_sound
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


class StoppedError(Exception):
    """Stands for whatever ends an attempt."""


def stop_after(model: Path, output: Path, done_bytes: int) -> None:
    """Begin a slice and leave it unfinished."""
    total = 0

    def count(more_bytes: int) -> None:
        nonlocal total
        total += more_bytes
        if total > done_bytes:
            raise StoppedError

    with open_whole_model(model) as files, pytest.raises(StoppedError):
        chosen = choose_segments(files, [parse_segment("all:0-3,6-9")])
        write_slice(files, chosen, output, count)


def begun(model: Path, output: Path) -> Target:
    """An unfinished slice that has at least one finished unit."""
    target = Target(output)
    stop_after(model, output, 6 * 10**6)
    assert target.journal.read_bytes().count(b"\n") > 2
    return target


def test_what_an_interruption_left_is_used(model: Path, tmp_path: Path) -> None:
    begun(model, tmp_path / "s.gguf")
    written = cut(model, tmp_path / "s.gguf", "all:0-3,6-9")
    assert written.reused_bytes > 0
    fresh = cut(model, tmp_path / "fresh.gguf", "all:0-3,6-9")
    assert written.path.read_bytes() == fresh.path.read_bytes()


def test_nothing_of_an_unfinished_file_is_trusted_without_its_hash(
    model: Path, tmp_path: Path
) -> None:
    target = begun(model, tmp_path / "s.gguf")
    untouched = cut_copy(target, model, tmp_path / "untouched")
    size = target.partial.stat().st_size
    for at in range(4096, size, 100_000):
        flip(target.partial, at)
    written = cut(model, tmp_path / "s.gguf", "all:0-3,6-9")
    assert written.reused_bytes < untouched
    assert written.path.read_bytes() == (tmp_path / "untouched" / "s.gguf").read_bytes()


def cut_copy(target: Target, model: Path, folder: Path) -> int:
    """Finish a copy of an unfinished slice elsewhere; tells what was reused."""
    folder.mkdir()
    for path in (target.partial, target.journal):
        (folder / path.name).write_bytes(path.read_bytes())
    return cut(model, folder / "s.gguf", "all:0-3,6-9").reused_bytes


@pytest.mark.parametrize("damage", [b"", b"7 abc", b"99999999 " + b"0" * 64 + b"\n", b"\xff" * 300])
def test_a_torn_or_strange_journal_does_no_harm(model: Path, tmp_path: Path, damage: bytes) -> None:
    target = begun(model, tmp_path / "s.gguf")
    with target.journal.open("ab") as journal:
        journal.write(damage)
    written = cut(model, tmp_path / "s.gguf", "all:0-3,6-9")
    fresh = cut(model, tmp_path / "fresh.gguf", "all:0-3,6-9")
    assert written.path.read_bytes() == fresh.path.read_bytes()


def test_other_segments_begin_anew(model: Path, tmp_path: Path) -> None:
    begun(model, tmp_path / "s.gguf")
    written = cut(model, tmp_path / "s.gguf", "all:1-3")
    assert written.reused_bytes == 0
    assert written.path.read_bytes() == cut(model, tmp_path / "f.gguf", "all:1-3").path.read_bytes()


def test_a_changed_model_begins_anew(model: Path, tmp_path: Path) -> None:
    begun(model, tmp_path / "s.gguf")
    flip(model, model.stat().st_size - 5)
    assert cut(model, tmp_path / "s.gguf", "all:0-3,6-9").reused_bytes == 0


def test_two_writers_of_one_file_do_not_meet(model: Path, tmp_path: Path) -> None:
    target = Target(tmp_path / "s.gguf")
    with target.journal.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LinkcppError, match="Another linkcpp is writing"):
            cut(model, target.path, "all:0")


@pytest.fixture
def small_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 12 MiB."""
    folder = tmp_path / "small"
    with small_disk(folder, size_mib=12):
        yield folder


def test_too_little_room_is_told_before_anything_is_copied(model: Path, small_folder: Path) -> None:
    with pytest.raises(LinkcppError, match=r"has .* free, but .* are needed"):
        cut(model, small_folder / "s.gguf", "all:all")


def test_a_disk_that_becomes_full_is_told_and_the_next_attempt_goes_on(
    model: Path, small_folder: Path, tmp_path: Path
) -> None:
    output, filler = small_folder / "s.gguf", small_folder / "filler"

    def fill(_: int) -> None:
        if not filler.exists():
            free = os.statvfs(small_folder)
            # The copy goes on meanwhile and may take the last bytes first: full is full.
            with contextlib.suppress(OSError):
                filler.write_bytes(bytes(free.f_bavail * free.f_frsize - 3 * 2**20))

    with open_whole_model(model) as files:
        chosen = choose_segments(files, [parse_segment("all:0-3,6")])
        with pytest.raises(LinkcppError, match="became full") as caught:
            write_slice(files, chosen, output, fill)
    assert caught.value.hint
    filler.unlink()
    written = cut(model, output, "all:0-3,6")
    assert written.reused_bytes > 0
    assert output.read_bytes() == cut(model, tmp_path / "f.gguf", "all:0-3,6").path.read_bytes()


def test_a_file_larger_than_the_file_system_takes_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(LinkcppError, match="does not take files of this size"):
            cut(model, tmp_path / "s.gguf", "all:all")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
