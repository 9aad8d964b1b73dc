"""What a launch would do, without doing it."""

from pathlib import Path

from linkcpp.common.records import Record
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_server import LOOPBACK, rpc_server_spec
from linkcpp.launch.decisions import remote_stages
from linkcpp.launch.folder import deployment_folder
from linkcpp.launch.records import LaunchRequest
from linkcpp.launch.rendering import llama_server_command, with_slots
from linkcpp.model.slices.segments import describe
from linkcpp.node.records import ServerRequest
from linkcpp.planning.arguments import server_arguments
from linkcpp.planning.records import ExpertShare, Plan, PlanMode

# Their configurations hold tokens, and are removed once they were read.
_DISPATCH = ("<python>", "-P", "-m", "linkcpp.dispatch", "<configuration>")
_FRONT = ("<python>", "-P", "-m", "linkcpp.front", "<configuration>")


class PlannedServer(Record):
    """A server that a node would be asked for; it starts the stock rpc-server on loopback there."""

    node_name: str
    urls: tuple[str, ...]
    request: ServerRequest
    command: tuple[str, ...]


class PlannedWorker(Record):
    """A worker of mode ``experts``; the slice that it needs is brought to its node before.

    ``slice_bytes`` is what its experts take, ``experts`` names them as ``linkcpp slice`` does.
    """

    node_name: str
    urls: tuple[str, ...]
    device: str
    slice_bytes: int
    experts: tuple[str, ...]
    command: tuple[str, ...]


class PlannedFile(Record):
    """A file that would be written; ``content`` is ``None`` where it grows while running."""

    path: str
    purpose: str
    content: str | None


class Preview(Record):
    """Every request, command and file of a launch, in order. ``programs`` start before ``command``.

    Placeholders in angle brackets stand for what only the start tells.
    """

    name: str
    servers: tuple[PlannedServer, ...]
    workers: tuple[PlannedWorker, ...] = ()
    programs: tuple[tuple[str, ...], ...] = ()
    command: tuple[str, ...]
    files: tuple[PlannedFile, ...]


def preview(request: LaunchRequest, *, program: str) -> Preview:
    """Return what a launch of ``request`` would do. Reads templates, writes nothing.

    Raises:
        LinkcppError: a template cannot be filled in.
    """
    plan = request.plan
    stages = remote_stages(plan)
    endpoints = {index: f"127.0.0.1:<port of tunnel {index}>" for index in stages}
    is_experts = plan.mode is PlanMode.EXPERTS
    experts_at = "127.0.0.1:<port of the virtual device>" if is_experts else None
    placement = server_arguments(plan, endpoints, experts_at=experts_at)
    if is_experts:
        placement = with_slots(placement, deployment_folder(request.name).path / "slots")
    command = llama_server_command(
        program=program,
        model_path="<hollow backbone>" if is_experts else request.model_path,
        model_name=request.name,
        placement=placement,
        host=LOOPBACK,
        port="<port behind the front>",
        api_key_file=str(deployment_folder(request.name).engine_key_file),
        own_templates=request.templates_folder,
    )
    return Preview(
        name=request.name,
        servers=tuple(_server(request, index) for index in stages),
        workers=tuple(_worker(plan, share) for share in plan.expert_shares),
        programs=(_DISPATCH, _FRONT) if is_experts else (_FRONT,),
        command=command,
        files=_files(request, command),
    )


def _worker(plan: Plan, share: ExpertShare) -> PlannedWorker:
    return PlannedWorker(
        node_name=share.node_name,
        urls=() if share.is_coordinator else plan.node_urls.get(share.node_id, ()),
        device=share.device,
        slice_bytes=share.memory.weight_bytes,
        experts=describe(share.segments),
        command=_rpc_server_command(share.device)
        if share.is_coordinator
        else ("<python>", "-P", "-m", "linkcpp.worker", "<configuration>"),
    )


def _server(request: LaunchRequest, index: int) -> PlannedServer:
    stage = request.plan.stages[index]
    return PlannedServer(
        node_name=stage.node_name,
        urls=request.plan.node_urls.get(stage.node_id, ()),
        request=ServerRequest(
            deployment=request.name,
            device=stage.device,
            memory_bytes=stage.memory.used_bytes + stage.memory.reserve_bytes,
        ),
        command=_rpc_server_command(stage.device),
    )


def _rpc_server_command(device: str) -> tuple[str, ...]:
    """Return what the node's agent will run; program, port and threads are its own to choose."""
    location = EngineLocation(
        llama_server=None, rpc_server=Path("<ggml-rpc-server>"), found_by="placeholder"
    )
    spec = rpc_server_spec(location, device=device, port=0, log_path=Path("<log>"))
    return tuple("<free port>" if word == "0" else word for word in spec.argv)


def _files(request: LaunchRequest, command: tuple[str, ...]) -> tuple[PlannedFile, ...]:
    folder = deployment_folder(request.name)
    wanted = [
        (folder.request_file, "what was asked for", None),
        (folder.plan_file, "the plan in force", None),
        (folder.state_file, "what `linkcpp status` reads", None),
        (folder.arguments_file, "llama-server's command line", "\n".join(command) + "\n"),
        (folder.supervisor_log, "log", None),
        (folder.engine_log, "log", None),
        (folder.front_log, "log", None),
        (folder.engine_key_file, "llama-server's own key, readable by its owner only", None),
    ]
    if request.api_key_file == str(folder.api_key_file):
        wanted.append((folder.api_key_file, "the API key, readable by its owner only", None))
    return tuple(
        PlannedFile(path=str(path), purpose=purpose, content=content)
        for path, purpose, content in wanted
    )
