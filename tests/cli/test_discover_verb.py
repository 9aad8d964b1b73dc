"""``linkcpp discover --watch`` where there is no terminal."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from linkcpp.cli.discover import changed_lines
from linkcpp.cluster.token import create_token

_PROGRAM = (sys.executable, "-m", "linkcpp")


def test_a_watch_writes_what_is_new_changed_or_gone() -> None:
    before = {"a": "attic at 10.0.0.5 ready", "b": "barn at 10.0.0.6 ready"}
    now = {"a": "attic at 10.0.0.5 unreachable", "c": "cellar at 10.0.0.7 ready"}
    assert changed_lines(before, before) == []
    assert changed_lines(before, now) == [*now.values(), "no longer: barn at 10.0.0.6 ready"]


@pytest.mark.slow
def test_a_watch_into_a_file_says_what_it_sees(tmp_path: Path) -> None:
    create_token()
    seen = tmp_path / "watch.txt"
    command = [*_PROGRAM, "discover", "--watch", "--no-mdns", "--node", "127.0.0.1:9"]
    with seen.open("w") as file, subprocess.Popen(command, stdout=file) as watching:
        try:
            while "unreachable" not in seen.read_text():
                assert watching.poll() is None
                time.sleep(0.05)
        finally:
            watching.send_signal(signal.SIGINT)
        assert watching.wait(120) == 130
    (line,) = [line for line in seen.read_text().splitlines() if "127.0.0.1:9" in line]
    assert re.match(r"\d\d:\d\d:\d\d ", line)
