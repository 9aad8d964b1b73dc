"""A file system that is full soon."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[None]:
    """Have a file system of its own at a new folder; skips the test where that is not to be had."""
    if not Path("/bin/mount").exists():
        pytest.skip("there is no /bin/mount")
    folder.mkdir(parents=True, mode=0o700)
    options = f"size={size_mib}m,mode=700"
    made = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", options, "linkcpp-test", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["/bin/umount", "-l", str(folder)], check=True)
