"""The folder of a deployment: its files, its lock, and who looks after it."""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from linkcpp.common.errors import LinkcppError, NotNowError, error_of_system, write_hint
from linkcpp.common.files import write_atomically
from linkcpp.common.paths import state_folder
from linkcpp.common.processes import ProcessIdentity
from linkcpp.dispatch.access import ControlAccess
from linkcpp.launch.records import (
    STATE_SCHEMA_VERSION,
    DeploymentState,
    LaunchRequest,
)
from linkcpp.planning.records import Plan

MAX_RECORD_BYTES = 64 * 2**20
MAX_SIGNATURE_BYTES = 4096
LOCK_PATIENCE_SECONDS = 2.0
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_Record = TypeVar("_Record", bound=BaseModel)


class DamagedError(LinkcppError):
    """A file of a deployment is not what this version of linkcpp writes."""


class DeploymentFolder:
    """Where one deployment keeps everything; nothing here is needed to run another one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.request_file = path / "request.json"
        self.plan_file = path / "plan.json"
        self.state_file = path / "state.json"
        self.arguments_file = path / "llama-server.args"
        self.api_key_file = path / "api-key"
        self.engine_key_file = path / "engine-key"
        self.lock_file = path / "supervisor.lock"
        self.supervisor_log = path / "supervisor.log"
        self.engine_log = path / "llama-server.log"
        self.dispatch_log = path / "dispatch.log"
        self.front_log = path / "front.log"
        self.routing_counts_file = path / "routing-counts.json"
        self.control_file = path / "dispatch-control.json"
        self.failure_counter = path / "failures"

    def write_request(self, request: LaunchRequest) -> None:
        """Write what was asked for."""
        write_atomically(self.request_file, request.model_dump_json(indent=1), mode=0o600)

    def read_request(self) -> LaunchRequest:
        """Read what was asked for."""
        return _read(self.request_file, LaunchRequest)

    def write_plan(self, plan: Plan) -> None:
        """Write the plan that is in force, which after a failure is not the one asked for."""
        write_atomically(self.plan_file, plan.model_dump_json(indent=1))

    def read_plan(self) -> Plan:
        """Read the plan that is in force."""
        return _read(self.plan_file, Plan)

    def write_control(self, access: ControlAccess) -> None:
        """Write how the dispatch process is asked; only the owner may read it."""
        write_atomically(self.control_file, access.model_dump_json(), mode=0o600)

    def read_control(self) -> ControlAccess:
        """Read how the dispatch process is asked."""
        return _read(self.control_file, ControlAccess)

    def write_state(self, state: DeploymentState) -> None:
        """Replace the state; readers see the old one or the new one."""
        write_atomically(self.state_file, state.model_dump_json(indent=1))

    def read_state(self) -> DeploymentState:
        """Read the state that was last written; it may be of a supervisor that is gone."""
        return _read(self.state_file, DeploymentState)

    def has_supervisor(self) -> bool:
        """Whether a living process looks after this deployment.

        The lock tells, since the system drops it with the process, however that ends.
        """
        try:
            descriptor = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def sign(self, supervisor: ProcessIdentity) -> None:
        """Write into the lock who holds it: ``stop`` must know, whatever the state has become."""
        # In place, since the lock is on this very file.
        with self.lock_file.open("r+", encoding="utf-8") as file:
            file.write(supervisor.model_dump_json())
            file.truncate()

    def signed_by(self) -> ProcessIdentity | None:
        """Return who signed last, who may be gone; ``None`` where nobody did."""
        try:
            with self.lock_file.open("rb") as file:
                return ProcessIdentity.model_validate_json(file.read(MAX_SIGNATURE_BYTES))
        except (OSError, ValidationError):
            return None

    def was_taken_from(self, supervisor: ProcessIdentity) -> bool:
        """Whether the lock of a supervisor that signed is gone, or another one's by now.

        So it is where somebody removed the folder: then nobody finds that supervisor any more.
        """
        return not self.lock_file.exists() or self.signed_by() not in (None, supervisor)

    def is_live(self) -> bool:
        """Whether something of it runs or may have been left, so that it wants looking after."""
        if self.has_supervisor():
            return True
        try:
            state = self.read_state()
        except LinkcppError:
            return True
        return not state.phase.is_final or state.llama_server is not None

    def forget(self) -> None:
        """Take it off the list of deployments; its logs stay."""
        for path in (self.state_file, self.request_file, self.plan_file, self.arguments_file):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[int]:
        """Hold the deployment; yields the descriptor, which may be handed on to the supervisor.

        Raises:
            LinkcppError: somebody else holds it.
        """
        _make_folder(self.path)
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _take(descriptor, self.name)
            yield descriptor
        finally:
            os.close(descriptor)


def deployments_folder() -> Path:
    """Where the folders of all deployments lie."""
    return state_folder() / "deployments"


def deployment_folder(name: str) -> DeploymentFolder:
    """Return the folder of a deployment, whether it exists or not.

    Raises:
        LinkcppError: no deployment can have that name.
    """
    if not _NAME.fullmatch(name):
        raise LinkcppError(
            f"{name!r} is not a name for a deployment.",
            hint="Use up to 63 of a-z, 0-9, '.', '_' and '-', a letter or digit first.",
        )
    return DeploymentFolder(deployments_folder() / name)


def all_deployments() -> list[DeploymentFolder]:
    """Return every deployment of which a state is known, by name."""
    parent = deployments_folder()
    if not parent.is_dir():
        return []
    return [
        DeploymentFolder(path)
        for path in sorted(parent.iterdir())
        if _NAME.fullmatch(path.name) and (path / "state.json").is_file()
    ]


def current_deployments() -> list[DeploymentFolder]:
    """Return the deployments that are live; where none is, the one that was so last."""
    known = all_deployments()
    live = [folder for folder in known if folder.is_live()]
    return live or sorted(known, key=lambda folder: folder.state_file.stat().st_mtime)[-1:]


def existing_deployment(name: str | None) -> DeploymentFolder:
    """Return the deployment ``name``; without a name the only live one, or the last that was.

    Raises:
        LinkcppError: it does not exist, or without a name there are none or several.
    """
    known = all_deployments() if name is not None else current_deployments()
    names = ", ".join(folder.name for folder in known)
    if name is not None:
        folder = deployment_folder(name)
        if not folder.state_file.is_file():
            raise LinkcppError(
                f"There is no deployment {name!r}.",
                hint=f"Known: {names}." if names else "`linkcpp launch PLAN` makes one.",
            )
        return folder
    if not known:
        raise LinkcppError("There is no deployment.", hint="`linkcpp launch PLAN` makes one.")
    if len(known) > 1:
        raise LinkcppError("Several deployments are live.", hint=f"Name one of: {names}.")
    return known[0]


def name_from_model(model_name: str) -> str:
    """Make a deployment's name from a model's: lower case, only what a name may have."""
    slug = re.sub(r"[^a-z0-9._]+", "-", model_name.lower()).strip("-._")
    return slug[:63].rstrip("-._") or "model"


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise error_of_system(
            error,
            f"Cannot make the folder {path}: {error.strerror}.",
            hint=write_hint(error, "set LINKCPP_HOME to another folder"),
        ) from error


def _take(descriptor: int, name: str) -> None:
    # `status` may look at the lock at this very moment; it lets go at once, a supervisor does not.
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NotNowError(
                    f"The deployment {name!r} already runs.",
                    hint=f"`linkcpp stop {name}` ends it; --name starts another one beside it.",
                ) from None
            time.sleep(0.05)
        else:
            return


def _read(path: Path, kind: type[_Record]) -> _Record:
    hint = f"`linkcpp stop {path.parent.name}` takes the deployment off the list; its logs stay."
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise DamagedError(f"{path} is too large to be a file of linkcpp.", hint=hint)
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise LinkcppError(
            f"Cannot read {path}: {error.strerror}.",
            hint=f"Make it readable, or remove the folder {path.parent}.",
        ) from error
    except ValidationError as error:
        problem = (
            f"{path} was written by another version of linkcpp, or is damaged "
            f"(this version reads schema {STATE_SCHEMA_VERSION})."
        )
        raise DamagedError(problem, hint=hint) from error
