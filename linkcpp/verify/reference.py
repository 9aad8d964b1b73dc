"""The whole model in one llama-server of the same build, started for the purpose."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from linkcpp.cluster.config import load_config
from linkcpp.cluster.findings import compare_engines
from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.engine.check import choose_engine
from linkcpp.engine.records import Engine
from linkcpp.launch.api import ApiClient, hold_api_port
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.llamaserver import LlamaServer, drop_overrides_from_environment
from linkcpp.launch.records import LaunchRequest
from linkcpp.launch.rendering import llama_server_command
from linkcpp.planning.arguments import server_arguments
from linkcpp.planning.records import Plan, PlanMode

LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.2


def reference_plan(plan: Plan) -> Plan:
    """Return the plan of one process on the CPU that computes one sequence as ``plan`` does. Pure.

    Context, cache types and batches are the plan's; weights are not repacked.
    """
    window = plan.stages[0].model_copy(
        update={
            "is_coordinator": True,
            "is_cpu": True,
            "device": "CPU",
            "first_layer": 0,
            "layer_count": plan.model.layer_count,
            "holds_output": True,
            "expert_layers_in_ram": (),
        }
    )
    options = plan.options.model_copy(update={"parallel": 1, "repack": False})
    return plan.model_copy(
        update={
            "mode": PlanMode.SINGLE,
            "stages": (window,),
            "expert_shares": (),
            "options": options,
        }
    )


def same_engine(plan: Plan) -> Engine:
    """Return this machine's engine, which must be the one that the plan was made for.

    Raises:
        LinkcppError: there is none, or it is another build.
    """
    engine = choose_engine(load_config().engine)
    if engine.fingerprint is not None and plan.engine.rpc_version is not None:
        difference = compare_engines(plan.engine, engine.fingerprint)
        if difference:
            raise LinkcppError(
                f"The engine of this machine is not the deployment's: {difference}.",
                hint="Choose the one that it was launched with (`linkcpp engine list`).",
            )
    return engine


def reference_log(folder: DeploymentFolder) -> Path:
    """Where the log of the whole model's llama-server is, also after its end."""
    return folder.path / "reference.log"


@contextlib.asynccontextmanager
async def running_reference(
    folder: DeploymentFolder, request: LaunchRequest, plan: Plan, model_path: str
) -> AsyncIterator[tuple[str, str]]:
    """Run the whole model; yields the URL of its API, and the key, once it is loaded.

    Raises:
        LinkcppError: it cannot be loaded; says why.
    """
    with hold_api_port(LOOPBACK, 0) as held:
        async with _running_on(held.number, folder, request, plan, model_path) as url_and_key:
            yield url_and_key


@contextlib.asynccontextmanager
async def _running_on(
    port: int, folder: DeploymentFolder, request: LaunchRequest, plan: Plan, model_path: str
) -> AsyncIterator[tuple[str, str]]:
    engine = await asyncio.to_thread(same_engine, plan)
    drop_overrides_from_environment()
    key, key_file = secrets.token_urlsafe(32), folder.path / "reference-key"
    write_atomically(key_file, f"{key}\n", mode=0o600)
    command = llama_server_command(
        program=str(engine.location.llama_server),
        model_path=model_path,
        model_name="reference",
        placement=server_arguments(reference_plan(plan), {}),
        host=LOOPBACK,
        port=port,
        api_key_file=str(key_file),
        own_templates=request.templates_folder,
    )
    log_path = reference_log(folder)
    server = await LlamaServer.start(
        command,
        library_folders=engine.location.library_folders,
        log_path=log_path,
        on_line=lambda _: None,
        port=port,
    )
    try:
        url = f"http://{LOOPBACK}:{port}"
        async with ApiClient(url, None) as api:
            while not await api.is_healthy():
                if server.has_ended:
                    raise LinkcppError(
                        f"The whole model cannot be loaded: {await server.wait_for_end()}.",
                        hint=f"Its log: {log_path}",
                    )
                await asyncio.sleep(_POLL_SECONDS)
        yield url, key
    finally:
        await server.stop()
        key_file.unlink(missing_ok=True)
