"""The plan as llama-server's command line: everything that decides placement comes from here.

Verified on both builds: ``-ngl N`` puts the last N of (blocks + output) on devices; ``-ts`` with
whole numbers of slots cuts exactly there; ``-c`` is shared out over the ``-np`` slots; a quantized
V cache needs flash attention; ``-ts`` takes at most 15 entries. Snapshots of prompts
(``--cache-ram``, 8 GiB unless told otherwise) would take RAM that no plan knows of: they are off,
and the number of checkpoints is what the plan counts.
"""

from collections.abc import Mapping

from linkcpp.planning.records import CacheType, Plan, Stage

# What the virtual device takes: the matrices of experts and their biases, whatever the layer.
EXPERT_TENSORS = r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)"
_PLAIN_TYPES = (CacheType.F32, CacheType.F16, CacheType.BF16)


def server_arguments(
    plan: Plan, endpoints: Mapping[int, str], *, experts_at: str | None = None
) -> tuple[str, ...]:
    """Return the arguments of llama-server that follow from a plan.

    ``endpoints`` names for each remote stage, by its index in ``plan.stages``, where its rpc-server
    is reached: always an IPv4 address and port (llama.cpp splits at the first colon).
    ``experts_at`` is that of the virtual device to which all experts go in mode ``experts``;
    without it the arguments are those of the backbone alone.

    Raises:
        KeyError: a remote stage has no endpoint.
    """
    options = plan.options
    devices = [stage for stage in plan.stages if not (stage.is_coordinator and stage.is_cpu)]
    remote = [index for index, stage in enumerate(plan.stages) if not stage.is_coordinator]
    rpc_names = {index: f"RPC{number}" for number, index in enumerate(remote)}
    names = [
        stage.device if stage.is_coordinator else rpc_names[index]
        for index, stage in enumerate(plan.stages)
        if stage in devices
    ]
    servers = [endpoints[index] for index in remote]
    cuts = [stage.slot_count for stage in devices]
    if experts_at is not None:
        # In the list of devices, or llama.cpp computes nothing there; no layer goes to it.
        names.append(f"RPC{len(servers)}")
        servers.append(experts_at)
        cuts.append(0)
    arguments = ["--fit", "off"]
    if servers:
        arguments += ["--rpc", ",".join(servers)]
    arguments += ["--device", ",".join(names) or "none"]
    arguments += ["-ngl", str(sum(cuts))]
    if devices and len(cuts) > 1:
        arguments += ["-ts", ",".join(map(str, cuts))]
    if override := _experts_in_ram(plan.stages):
        arguments += ["-ot", override]
    if experts_at is not None:
        arguments += ["-ot", f"{EXPERT_TENSORS}={names[-1]}[{experts_at}]"]
    if not options.repack:
        arguments.append("--no-repack")
    arguments += [
        "-c", str(options.context_tokens * options.parallel),
        "-np", str(options.parallel),
        "--no-kv-unified",
        "-ctk", options.cache_type_k.value,
        "-ctv", options.cache_type_v.value,
        "-b", str(options.batch_tokens),
        "-ub", str(min(options.ubatch_tokens, options.batch_tokens)),
        "--cache-ram", "0",
        "--ctx-checkpoints", str(options.checkpoint_count),
    ]  # fmt: skip
    if options.cache_type_v not in _PLAIN_TYPES:
        arguments += ["--flash-attn", "on"]
    return tuple(arguments)


def _experts_in_ram(stages: tuple[Stage, ...]) -> str | None:
    layers = [str(layer) for stage in stages for layer in stage.expert_layers_in_ram]
    return rf"blk\.({'|'.join(layers)})\.ffn_[a-z_]*exps\.=CPU" if layers else None
