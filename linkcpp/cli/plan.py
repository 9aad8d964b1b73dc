"""``linkcpp plan``: who would hold what of a model, or why it does not fit."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.text import Text

from linkcpp.cli.output import console, print_json, status_console, working
from linkcpp.cli.plan_files import load_counts, read_document, require_plan_folder, save_plan
from linkcpp.cli.plan_notes import alone_note, next_step
from linkcpp.cli.plan_report import explanation, report
from linkcpp.cli.verb import refuse_together, verb
from linkcpp.cluster.config import load_config
from linkcpp.cluster.identity import load_identity
from linkcpp.cluster.measure import this_machine
from linkcpp.cluster.records import Cluster
from linkcpp.cluster.token import load_token
from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import parse_bytes
from linkcpp.engine.check import choose_engine
from linkcpp.engine.records import Engine
from linkcpp.launch.folder import all_deployments
from linkcpp.model.records import ModelInventory
from linkcpp.node.discovery import DISCOVER_SECONDS, Discovery
from linkcpp.node.hub_discovery import find_everywhere
from linkcpp.planning.assumed import (
    assumed_nodes,
    with_coordinator_memory,
    with_nodes,
)
from linkcpp.planning.offers import coordinator_offers, is_usable, require_minimum
from linkcpp.planning.records import MAX_DEVICES, CacheType, Plan, PlanMode, PlanOptions
from linkcpp.planning.shortfall import InfeasibleError, make_plan
from linkcpp.registry.hub_location import parse_hub_location
from linkcpp.registry.model_lookup import load_model_anywhere

app = verb()


@app.command()
def plan(
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A GGUF file, a URL, a model of the --hub, or a preset like 122B."
        ),
    ],
    mode: Annotated[PlanMode, typer.Option(help="How to spread the model.")] = PlanMode.AUTO,
    context: Annotated[
        int,
        typer.Option(
            "--context", "-c", min=1, max=2**24, help="Context size of a sequence, in tokens."
        ),
    ] = 4096,
    parallel: Annotated[
        int, typer.Option(min=1, max=256, help="Sequences served at the same time.")
    ] = 1,
    cache_type_k: Annotated[CacheType, typer.Option(help="Type of the K cache.")] = CacheType.F16,
    cache_type_v: Annotated[CacheType, typer.Option(help="Type of the V cache.")] = CacheType.F16,
    batch: Annotated[int, typer.Option(min=32, max=2**20, help="Logical batch (-b).")] = 2048,
    ubatch: Annotated[int, typer.Option(min=32, max=2**16, help="Micro-batch (-ub).")] = 512,
    memory: Annotated[
        str | None, typer.Option(help="Most RAM that the coordinator may use, such as 12GB.")
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option(help="Memory to leave free on every device; default 5 %, at most 512 MiB."),
    ] = None,
    min_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_DEVICES,
            help="Use at least this many devices of nodes (mode layers).",
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, max=16, help="How many machines should hold each expert.")
    ] = 1,
    hot: Annotated[
        Path | None,
        typer.Option(
            help="Recorded routing counts, so that often chosen experts go to near machines."
        ),
    ] = None,
    repack: Annotated[
        bool, typer.Option("--repack", help="Faster on some CPUs, but not the same bits.")
    ] = False,
    node: Annotated[
        list[str] | None, typer.Option("--node", help="Ask this address too; may be repeated.")
    ] = None,
    hub: Annotated[
        list[str] | None,
        typer.Option("--hub", help="Plan over the nodes of this hub too; may be repeated."),
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option("--nodes", help="Nodes from a saved `linkcpp discover --json`.")
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            help="What if there were more machines: 24GB, 3x24GB, 2x8GB@gpu; @gpu:936GB/s says how "
            "fast a device reads its memory."
        ),
    ] = None,
    no_mdns: Annotated[
        bool, typer.Option("--no-mdns", help="Ask only the addresses that are named.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show memory and time in detail, and why.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Decide which machine holds which layers or experts, and predict memory and speed."""
    refuse_together({"--nodes": nodes, "--node": node})
    options = PlanOptions(
        mode=_mode(mode, min_nodes, {"--replicas": replicas > 1, "--hot": hot is not None}),
        context_tokens=context,
        parallel=parallel,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        batch_tokens=batch,
        ubatch_tokens=ubatch,
        reserve_bytes=None if reserve is None else parse_bytes(reserve),
        minimum_stages=min_nodes or 1,
        replicas=replicas,
        repack=repack,
    )
    memory_bytes = None if memory is None else parse_bytes(memory)
    counts = None if hot is None else load_counts(hot)
    if output is not None:
        require_plan_folder(output)
    with working("Looking at the model and the nodes…") as say:
        inventory = load_model_anywhere(model, hub or [])
        at_hub = parse_hub_location(inventory.source)
        hub_urls = list(dict.fromkeys([*(hub or []), *([at_hub.hub_url] if at_hub else [])]))
        if at_hub is not None:
            options = _for_hub_model(options, inventory)
        cluster = (
            _read_cluster(nodes) if nodes else _find_cluster(options, node or [], hub_urls, no_mdns)
        )
        cluster = _changed(cluster, options, memory_bytes, assume or [])
        require_minimum(inventory, cluster, options)
        say("Planning…")
        try:
            made = make_plan(inventory, cluster, options, counts)
        except InfeasibleError as error:
            if as_json:
                print_json(error.infeasible)
            if not nodes:
                error.hint = _with_live_deployments(error.hint)
            raise
    if output is not None:
        save_plan(made, output)
    _print(made, cluster, output, explain=inventory if explain else None, as_json=as_json)


def _with_live_deployments(hint: str | None) -> str | None:
    """Add what holds memory of this machine and its nodes, where something does."""
    live = [folder.name for folder in all_deployments() if folder.has_supervisor()]
    if not live:
        return hint
    held = "memory of this machine and its nodes that a new plan cannot count on"
    return f"{hint or ''} Or: `linkcpp stop {live[0]}`, if that may end: it runs and takes {held}."


def _print(
    made: Plan,
    cluster: Cluster,
    output: Path | None,
    *,
    explain: ModelInventory | None,
    as_json: bool,
) -> None:
    if as_json:
        print_json(made)
        return
    out = console()
    for part in report(made):
        out.print(part)
    if explain is not None:
        for part in explanation(made, explain):
            out.print(part)
    for node in cluster.nodes:
        if not is_usable(node.status, made.mode):
            out.print(Text(f"not used: {node.name}: {node.reason or node.status}", style="yellow"))
    if note := alone_note(made, cluster):
        out.print(Text(note, style="yellow"), soft_wrap=True)
    if output is not None:
        out.print(Text(next_step(made, cluster, output)), soft_wrap=True)


def _mode(mode: PlanMode, min_nodes: int | None, about_experts: dict[str, bool]) -> PlanMode:
    """Who says over how many nodes wants layers spread, whatever would be faster.

    ``about_experts`` tells of each option that only mode experts heeds whether it is given.
    """
    chosen = _spreading_layers(mode, min_nodes)
    given = [name for name, is_given in about_experts.items() if is_given]
    if given and chosen not in (PlanMode.AUTO, PlanMode.EXPERTS):
        raise LinkcppError(
            f"Mode {chosen} does not spread experts, which {given[0]} asks for.",
            hint=f"Omit {' and '.join(given)}, or plan with --mode experts.",
        )
    return chosen


def _spreading_layers(mode: PlanMode, min_nodes: int | None) -> PlanMode:
    if min_nodes is None:
        return mode
    if mode not in (PlanMode.AUTO, PlanMode.LAYERS):
        raise LinkcppError(
            f"Mode {mode} does not spread layers over nodes, which --min-nodes asks for.",
            hint="Leave --min-nodes out, or plan with --mode layers.",
        )
    return PlanMode.LAYERS


def _for_hub_model(options: PlanOptions, inventory: ModelInventory) -> PlanOptions:
    """Spread the experts of a model that is at a hub only: it can be launched in no other way."""
    if options.mode is PlanMode.AUTO and inventory.shape.expert_count > 0:
        return options.model_copy(update={"mode": PlanMode.EXPERTS})
    return options


def _find_cluster(
    options: PlanOptions, urls: list[str], hub_urls: list[str], no_mdns: bool
) -> Cluster:
    config = load_config()
    engine = _engine(config.engine)
    is_alone = options.mode is PlanMode.SINGLE
    if options.mode is PlanMode.AUTO and not urls and not hub_urls:
        # Someone with one machine needs no token to plan for it.
        try:
            load_token()
        except LinkcppError as error:
            status_console().print(Text(f"Planning without nodes: {error}", style="yellow"))
            is_alone = True
    if is_alone:
        coordinator = this_machine(
            engine,
            identity=load_identity(config.name),
            memory_limit_bytes=config.memory_limit_bytes,
        )
        return Cluster(coordinator=coordinator, nodes=())
    found = asyncio.run(
        find_everywhere(
            engine,
            hub_urls=hub_urls,
            urls=urls,
            use_mdns=not no_mdns,
            timeout_seconds=DISCOVER_SECONDS,
        )
    )
    for note in found.notes:
        status_console().print(Text(note, style="yellow"))
    return found.cluster


def _engine(explicit: Path | None) -> Engine | None:
    """Choose the engine that is there; a plan can be made without one."""
    try:
        return choose_engine(explicit)
    except LinkcppError as error:
        status_console().print(Text(f"Planning without an engine: {error}", style="yellow"))
        return None


def _read_cluster(path: Path) -> Cluster:
    try:
        return Discovery.model_validate_json(read_document(path, "list of nodes")).cluster
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise LinkcppError(
            f"{path} is not a saved discovery: {where or 'content'}: {first['msg']}.",
            hint="Make it with `linkcpp discover --json > nodes.json`.",
        ) from error


def _changed(
    cluster: Cluster, options: PlanOptions, memory_bytes: int | None, assume: list[str]
) -> Cluster:
    if memory_bytes is not None:
        offered = coordinator_offers(cluster, options)[0].available_bytes
        cluster = with_coordinator_memory(cluster, min(offered, memory_bytes))
    for index, specification in enumerate(assume):
        added = assumed_nodes(cluster, specification, batch=index)
        cluster = with_nodes(cluster, added)
    return cluster
