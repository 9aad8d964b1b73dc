"""From a plan file to a running supervisor: the request, the API key, the detached process."""

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from linkcpp.common.errors import LinkcppError, NotNowError
from linkcpp.common.files import write_atomically
from linkcpp.common.paths import expand_home
from linkcpp.common.sockets import is_loopback
from linkcpp.front.api_keys import read_api_key
from linkcpp.launch.api import hold_api_port
from linkcpp.launch.events import first_state
from linkcpp.launch.folder import DeploymentFolder, deployment_folder, name_from_model
from linkcpp.launch.records import (
    DEFAULT_PATIENCE_SECONDS,
    DeploymentState,
    LaunchRequest,
)
from linkcpp.launch.rendering import templates_folder
from linkcpp.planning.records import Plan, PlanMode
from linkcpp.registry.model_lookup import is_elsewhere
from linkcpp.worker.sampling import DEFAULT_RATE

POLL_SECONDS = 0.1


def make_request(
    plan: Plan,
    *,
    model: str | None,
    name: str | None,
    host: str,
    port: int,
    api_key_file: Path | None,
    templates: str | None,
    node_urls: tuple[str, ...],
    use_mdns: bool,
    fallback_bytes: int | None = None,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
    spot_check_rate: float = DEFAULT_RATE,
    keeps_trying: bool = False,
) -> LaunchRequest:
    """Turn what the user said into a whole request, all paths absolute.

    Raises:
        LinkcppError: there is no model file, or no deployment can have the name.
    """
    folder = deployment_folder(name_from_model(plan.model.name) if name is None else name)
    own_templates = templates_folder(templates)
    key_file = expand_home(api_key_file).absolute() if api_key_file else None
    if key_file is not None:
        read_api_key(key_file)
    elif not is_loopback(host):
        key_file = folder.api_key_file
    return LaunchRequest(
        name=folder.name,
        plan=plan,
        model_path=str(_model_path(plan, model)),
        host=host,
        port=port,
        api_key_file=str(key_file) if key_file else None,
        templates_folder=str(own_templates) if own_templates else None,
        node_urls=node_urls,
        use_mdns=use_mdns,
        fallback_bytes=fallback_bytes,
        patience_seconds=patience_seconds,
        spot_check_rate=spot_check_rate,
        keeps_trying=keeps_trying,
    )


def _model_path(plan: Plan, model: str | None) -> Path | str:
    location = model or plan.model.source
    if is_elsewhere(location):
        if plan.mode is PlanMode.EXPERTS:
            return location
        raise LinkcppError(
            f"The model is at {location}, and a plan of mode {plan.mode} needs its file on this "
            "machine.",
            hint="Name the model's GGUF with --model, or plan with --mode experts.",
        )
    path = expand_home(Path(location))
    if path.is_file():
        return path.absolute()
    if model is not None:
        raise NotNowError(
            f"There is no model file {model}.",
            hint="Name a GGUF with --model; a model of a hub is hub+https://hub.example#model=NAME.",
        )
    raise NotNowError(
        f"The plan is for {location}, which is not a file on this machine.",
        hint="Name the model's GGUF with --model.",
    )


@contextlib.contextmanager
def prepared(request: LaunchRequest) -> Iterator[tuple[DeploymentFolder, tuple[int, ...]]]:
    """Take a deployment's folder, lock and port, and write the request.

    A port of 0 becomes a free one here, so that it stays the same over restarts. Yields the folder
    and the descriptors that a supervisor in another process has to inherit: the lock's first, then
    those that keep the port.

    Raises:
        LinkcppError: the deployment already runs, the port is taken, or the folder is not writable.
    """
    folder = deployment_folder(request.name)
    with folder.lock() as lock, hold_api_port(request.host, request.port) as held:
        request = request.model_copy(update={"port": held.number})
        if request.api_key_file == str(folder.api_key_file):
            write_atomically(folder.api_key_file, f"{secrets.token_urlsafe(32)}\n", mode=0o600)
        folder.write_request(request)
        folder.write_plan(request.plan)
        folder.write_state(first_state(request, now=time.time()))
        yield folder, (lock, *held.descriptors())


def start_detached(
    folder: DeploymentFolder, inherited: tuple[int, ...]
) -> "subprocess.Popen[bytes]":
    """Start the supervisor in a session of its own; it takes over the lock and the port.

    ``inherited`` are the descriptors that ``prepared`` gave.

    Raises:
        LinkcppError: its log cannot be written.
    """
    try:
        with folder.supervisor_log.open("ab") as output:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "linkcpp.launch.supervisor",
                    str(folder.path),
                    str(inherited[0]),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=inherited,
            )
    except OSError as error:
        raise LinkcppError(
            f"The supervisor cannot be started: {error}.",
            hint=f"See that {folder.path} is writable and the disk is not full.",
        ) from error


def states_until_up(
    folder: DeploymentFolder, supervisor: "subprocess.Popen[bytes]"
) -> Iterator[DeploymentState]:
    """Yield the state again and again until the deployment is ready or has ended.

    Raises:
        LinkcppError: it failed, or its supervisor ended without a word.
    """
    while True:
        # In this order, so that the last state of a supervisor that ended is seen.
        has_ended = supervisor.poll() is not None
        state = folder.read_state()
        yield state
        if state.phase.is_final:
            supervisor.wait()
            return
        if state.ready_at is not None:
            return
        if has_ended:
            raise LinkcppError(
                f"The supervisor of {folder.name!r} ended unexpectedly "
                f"(exit code {supervisor.returncode}).",
                hint=f"See {folder.supervisor_log}.",
            )
        time.sleep(POLL_SECONDS)
