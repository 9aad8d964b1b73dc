import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError, NotNowError
from linkcpp.common.files import write_atomically


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


def test_a_file_is_replaced_whole_and_has_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    write_atomically(path, "old", mode=0o600)
    write_atomically(path, b"new", mode=0o600)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert _names(path.parent) == ["secret"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(path, "text")
    assert os.read(reader, 100) == b"text"
    assert path.is_fifo()
    os.close(reader)


def test_an_interrupted_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    write_atomically(path, "old")

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["state"]


def test_a_write_that_fails_half_way_is_told_in_one_sentence(tmp_path: Path) -> None:
    # A limit on the size of files makes write() fail with EFBIG.
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from linkcpp.common.files import write_atomically\n"
        "from linkcpp.common.errors import LinkcppError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_atomically(Path(sys.argv[1]), bytes(5000))\n"
        "except LinkcppError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "plan.json")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Cannot write" in done.stdout
    assert "Choose another folder" in done.stdout
    assert _names(tmp_path) == []


def test_a_disk_without_room_is_told_to_be_freed() -> None:
    with pytest.raises(NotNowError, match=r"Free some space, or choose another folder\."):
        write_atomically(Path("/dev/full"), "text")


def test_a_folder_in_place_of_a_file_is_not_a_matter_of_room(tmp_path: Path) -> None:
    with pytest.raises(LinkcppError, match="Name a file rather than a folder") as caught:
        write_atomically(tmp_path, "text")
    assert "space" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LinkcppError, match="Cannot write"):
        write_atomically(tmp_path / "file" / "below", "text")


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o000])
def test_what_a_program_writes_is_its_owners_but_a_file_that_was_named_is_as_the_umask_says(
    umask: int, tmp_path: Path
) -> None:
    old = tmp_path / "state"
    old.mkdir()
    old.chmod(0o755)
    code = (
        "import os, sys; from pathlib import Path; from linkcpp.common.files import *\n"
        "home = Path(sys.argv[1]); os.umask(int(sys.argv[2]))\n"
        "keep_to_owner([home / 'state', home / 'not-there'])\n"
        "write_atomically(home / 'cache' / 'kept', 'x')\n"
        "(home / 'log').open('wb').close()\n"
        "write_atomically(home / 'named', 'x', mode=users_mode())\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(umask)], check=True)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {
        "state": 0o700,
        "cache": 0o700,
        "kept": 0o600,
        "log": 0o600,
        "named": 0o666 & ~umask,
    }
