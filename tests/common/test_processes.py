"""Processes are told apart whatever the clock does, and where the system hides the boot time."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from linkcpp.common import processes
from linkcpp.common.processes import descendants_of, identity_of, is_alive

_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the boot time is read off /proc/stat")


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of our own that does nothing for as long as a test takes."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def _denied(*_: object, **__: object) -> float:
    raise PermissionError(13, "Permission denied", "/proc/stat")


def test_a_reused_process_number_is_not_taken_for_the_process() -> None:
    mine = identity_of(os.getpid())
    assert mine is not None
    assert mine.start is not None
    assert is_alive(mine)
    assert not is_alive(mine.model_copy(update={"start": mine.start - 500}))
    assert not is_alive(mine.model_copy(update={"boot_id": "another"}))


def test_a_process_that_ended_is_gone_also_before_anybody_waited_for_it(
    child: "subprocess.Popen[bytes]",
) -> None:
    identity = identity_of(child.pid)
    assert is_alive(identity)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(identity)
    child.wait()
    assert not is_alive(identity)


@_LINUX
@pytest.mark.parametrize("boot_time", [lambda: 1.0, _denied], ids=["stepped", "hidden"])
def test_a_step_of_the_clock_and_a_hidden_boot_time_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
    child: "subprocess.Popen[bytes]",
    boot_time: Callable[[], float],
) -> None:
    before = identity_of(child.pid)
    monkeypatch.setattr("psutil._pslinux.boot_time", boot_time)
    assert identity_of(child.pid) == before
    assert is_alive(before)
    # Beside others: a database of other tests, for instance.
    assert child.pid in {process.pid for process in descendants_of(os.getpid())}
    assert descendants_of(child.pid) == ()


@_LINUX
def test_a_process_that_may_not_be_looked_at_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, child: "subprocess.Popen[bytes]"
) -> None:
    seen = identity_of(child.pid)
    monkeypatch.setattr(processes, "_ticks_of", _denied)
    unseen = identity_of(child.pid)
    assert unseen is not None
    assert unseen.start is None
    assert is_alive(seen)
    assert is_alive(unseen)
