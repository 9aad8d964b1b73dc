"""Whatever became of a deployment's state and of the clock, ``stop`` ends what runs of it."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.launch import stopping
from linkcpp.launch.folder import DeploymentFolder, all_deployments, deployment_folder
from linkcpp.launch.stopping import StopResult, stop_deployment

pytestmark = pytest.mark.slow

# Holds the lock as a supervisor does, and writes its last word when it is told to end.
_SUPERVISOR = """
import os, signal, sys, time
from linkcpp.common.processes import identity_of
from linkcpp.launch.events import PhaseEntered, SupervisorStarted, apply, first_state
from linkcpp.launch.folder import deployment_folder
from linkcpp.launch.records import LaunchRequest, Phase
from tests.launch.plans import layers_plan

request = LaunchRequest(
    name="smol", plan=layers_plan("a", "b"), model_path="/m.gguf", host="127.0.0.1", port=8080,
    api_key_file=None, templates_folder=None,
)
folder = deployment_folder("smol")
state = apply(first_state(request, now=1.0), SupervisorStarted(identity_of(os.getpid())), now=1.0)

def end(*_):
    folder.write_state(apply(state, PhaseEntered(Phase.STOPPED), now=2.0))
    sys.exit()

signal.signal(signal.SIGTERM, end)
with folder.lock():
    if "unsigned" not in sys.argv:
        folder.sign(identity_of(os.getpid()))
    folder.write_state(state)
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def _supervised(*arguments: str) -> Iterator[tuple[DeploymentFolder, "subprocess.Popen[bytes]"]]:
    command = [sys.executable, "-c", textwrap.dedent(_SUPERVISOR), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield deployment_folder("smol"), process
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="the boot time is read off /proc/stat")
def test_a_supervisor_is_found_after_a_step_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with _supervised() as (folder, process):
        # A step of the clock moves the time of the boot, and psutil's time of a start with it.
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 1.0)
        assert stop_deployment(folder) is StopResult.STOPPED
        assert process.wait() == 0


def test_a_supervisor_whose_state_was_damaged_is_ended() -> None:
    with _supervised() as (folder, process):
        folder.state_file.write_text("{")
        assert stop_deployment(folder) is StopResult.STOPPED
        assert process.wait() == 0


def test_a_damaged_state_of_what_does_not_run_is_taken_off_the_list() -> None:
    with _supervised() as (folder, process):
        process.kill()
    folder.state_file.write_bytes(b"\xff{")
    assert stop_deployment(folder) is StopResult.FORGOTTEN
    assert all_deployments() == []


def test_a_supervisor_that_cannot_be_found_is_said_to_be_so_and_not_to_be_stopped_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopping, "IDENTITY_SECONDS", 0.0)
    with (
        _supervised("unsigned") as (folder, _),
        pytest.raises(LinkcppError, match="does not end or is not to be found") as raised,
    ):
        stop_deployment(folder)
    assert raised.value.hint is not None
    assert "linkcpp stop" not in raised.value.hint
    assert str(folder.lock_file) in raised.value.hint
