"""What is cached stays within bounds, and nothing that is in use goes."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from linkcpp.common.cache import (
    allocated_bytes,
    clean_cache,
    hold_folder,
    read_kept,
    write_kept,
)

MEBIBYTE = 2**20


def filled(parent: Path, name: str, used_at: float) -> Path:
    folder = parent / name
    hold_folder(folder).close()
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_bytes(b"x" * MEBIBYTE)
    os.utime(folder, (used_at, used_at))
    return folder


def test_what_was_not_used_for_max_goes_first_until_the_rest_fits(tmp_path: Path) -> None:
    folders = [filled(tmp_path, name, at) for name, at in (("b", 3), ("a", 2), ("c", 1))]
    size = allocated_bytes(folders[0])
    assert size >= MEBIBYTE
    assert clean_cache(tmp_path, 3 * size) == []
    assert clean_cache(tmp_path, 2 * size) == [folders[2]]
    assert clean_cache(tmp_path, 0) == [folders[1], folders[0]]
    assert list(tmp_path.iterdir()) == []


def test_what_is_held_stays_also_by_another_process(tmp_path: Path) -> None:
    mine, theirs, free = (filled(tmp_path, name, 1) for name in ("mine", "theirs", "free"))
    code = (
        "import sys; from pathlib import Path; from linkcpp.common.cache import hold_folder;"
        "held = hold_folder(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(theirs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with hold_folder(mine):
        assert clean_cache(tmp_path, 0) == [free]
        # Held by its user, not by a file that a crash leaves behind.
        other.kill()
        other.communicate()
        assert clean_cache(tmp_path, 0) == [theirs]
    assert clean_cache(tmp_path, 0) == [mine]


def test_to_use_it_is_to_keep_it_longer(tmp_path: Path) -> None:
    first, second = filled(tmp_path, "a", 1), filled(tmp_path, "b", 2)
    hold_folder(first).close()
    assert clean_cache(tmp_path, allocated_bytes(first)) == [second]


def test_who_takes_a_folder_while_it_is_removed_gets_a_whole_one(tmp_path: Path) -> None:
    stop = threading.Event()

    def clean() -> None:
        while not stop.is_set():
            clean_cache(tmp_path, 0)

    cleaning = threading.Thread(target=clean)
    cleaning.start()
    try:
        for number in range(200):
            with hold_folder(tmp_path / "a"):
                (tmp_path / "a" / str(number)).write_bytes(b"x")
                assert (tmp_path / "a" / str(number)).read_bytes() == b"x"
    finally:
        stop.set()
        cleaning.join()


def test_a_removal_that_was_killed_is_completed(tmp_path: Path) -> None:
    (tmp_path / ".removed-a").mkdir()
    (tmp_path / ".removed-a" / "file").write_bytes(b"x")
    assert clean_cache(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_small_file_that_was_damaged_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    assert read_kept(path) is None
    write_kept(path, "content")
    assert read_kept(path) == b"content"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_kept(path) is None
        path.write_bytes(whole[:at])
        assert read_kept(path) is None
