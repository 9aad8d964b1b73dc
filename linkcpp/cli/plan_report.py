"""A plan for people: who holds what, how full it is, how long a token takes, and why."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from linkcpp.cli.inspect import bar
from linkcpp.cli.output import window_text
from linkcpp.cli.plan_experts_report import expert_explanation, expert_report, share_name
from linkcpp.cli.plan_notes import parts_text, snapshot_note, weight_note
from linkcpp.cli.plan_table import BarsWhereRoom, plan_table
from linkcpp.cli.tables import WholeTable
from linkcpp.common.units import format_bytes
from linkcpp.model.records import ModelInventory
from linkcpp.planning.records import DeviceMemory, Plan, Stage
from linkcpp.planning.sharing import sharing_reasons

BAR_CELLS = 10
WIDE_BAR_CELLS = 60
# Kinds of memory in the order of the bars, with colours that differ in brightness too.
_KINDS = (
    ("weights", "cyan"),
    ("KV cache", "green"),
    ("state", "magenta"),
    ("snapshots", "blue"),
    ("buffers", "yellow"),
    ("programs", "red"),
    ("reserve", "bright_black"),
)


def report(plan: Plan) -> Iterator[RenderableType]:
    """Lay a plan out: a table of stages, the prediction, the reason."""
    model = plan.model
    yield Text.assemble(
        (model.name, "bold"),
        f"  {format_bytes(model.weight_bytes)} of weights, {model.layer_count} layers, "
        f"{_options(plan)}",
    )
    yield BarsWhereRoom(lambda has_bars: _stage_table(plan, has_bars=has_bars))
    if plan.expert_shares:
        yield from expert_report(plan)
    expected = plan.expectation
    rate = 1000 / expected.token_ms if expected.token_ms else float("inf")
    yield Text.assemble(
        "Predicted on idle machines: ",
        (f"{expected.token_ms:.1f} ms a token", "bold"),
        f" ({rate:.3g} tokens/s): memory {expected.compute_ms:.1f} ms, "
        f"network {expected.network_ms:.1f} ms",
    )
    yield Text(f"Mode {plan.mode}: {plan.reason}.")
    if note := snapshot_note(plan):
        yield Text(f"{note}.")
    for note in expected.assumptions:
        yield Text(f"Assumed: {note}", style="yellow")


def _options(plan: Plan) -> str:
    options = plan.options
    slots = f" x {options.parallel}" if options.parallel > 1 else ""
    kinds = dict.fromkeys((options.cache_type_k.value, options.cache_type_v.value))
    return f"context {options.context_tokens:,}{slots}, {'/'.join(kinds)} cache"


def _stage_table(plan: Plan, *, has_bars: bool) -> Table:
    rows = list(_stage_rows(plan))
    table = plan_table((name for name, *_ in rows), "LAYERS")
    for title in ("WEIGHTS", "CACHE", "USED", "OF"):
        table.add_column(title, justify="right", no_wrap=True)
    if has_bars:
        table.add_column("", no_wrap=True)
    for name, device, layers, memory in rows:
        offered = memory.available_bytes
        filled = min(1.0, memory.used_bytes / offered) if offered else 1.0
        table.add_row(
            Text(name),
            Text(device),
            layers,
            format_bytes(memory.weight_bytes),
            format_bytes(memory.kv_bytes + memory.recurrent_bytes),
            format_bytes(memory.used_bytes),
            format_bytes(offered),
            *([Text(bar(filled, BAR_CELLS), "cyan")] if has_bars else []),
        )
    return table


def _stage_rows(plan: Plan) -> Iterator[tuple[str, str, str, DeviceMemory]]:
    here = f"{plan.coordinator_name} (here)"
    if not any(stage.is_coordinator and stage.is_cpu for stage in plan.stages):
        yield here, "CPU", "input", plan.coordinator_memory
    for stage in plan.stages:
        is_host = stage.is_coordinator and stage.is_cpu
        memory = plan.coordinator_memory if is_host else stage.memory
        name = here if stage.is_coordinator else stage.node_name
        yield name, stage.device, layers_text(stage), memory


def layers_text(stage: Stage) -> str:
    """Name a window: ``0-4``, ``22-29 + output``, ``0-47, experts of 0-20 in RAM``."""
    text = window_text(stage.first_layer, stage.layer_count, holds_output=stage.holds_output)
    if kept := stage.expert_layers_in_ram:
        span = f"{kept[0]}-{kept[-1]}" if len(kept) > 1 else str(kept[0])
        text += f", experts of {span} in RAM"
    return text


def explanation(plan: Plan, inventory: ModelInventory) -> Iterator[RenderableType]:
    """Show what fills each device, where a token's time goes, and how good the plan is."""
    yield Text("\nMemory", style="bold")
    yield Text.assemble(*((f"█ {kind}  ", style) for kind, style in _KINDS), "· free")
    for title, memory in _devices(plan):
        yield Text(
            f"{title}: {format_bytes(memory.used_bytes)} used, "
            f"{format_bytes(memory.reserve_bytes)} reserved, "
            f"of {format_bytes(memory.available_bytes)}"
        )
        yield Text(f"  {parts_text(memory)}")
        yield _memory_bar(memory)
    if note := weight_note(plan):
        yield Text(note)
    yield Text("\nTime of one token on idle machines", style="bold")
    yield _time_table(plan)
    if plan.expert_shares:
        yield from expert_explanation(plan)
    if reasons := sharing_reasons(plan, inventory):
        yield Text("\nWhy so many layers each", style="bold")
        yield from (Text(f"{reason}.") for reason in reasons)
        yield Text("A token passes one stage after the other: equal shares are not faster.\n")
    yield Text(f"Objective: {plan.expectation.objective}.")
    gap = plan.expectation.optimality_gap
    proof = "no placement is faster" if gap < 1e-6 else f"at most {gap:.2%} slower than the best"
    yield Text(f"Proved by the solver: {proof}, under these speeds and sizes.")
    yield Text(f"Why: {plan.reason}.")


def _devices(plan: Plan) -> Iterator[tuple[str, DeviceMemory]]:
    yield f"{plan.coordinator_name} (here) CPU", plan.coordinator_memory
    for stage in plan.stages:
        if not (stage.is_coordinator and stage.is_cpu):
            yield f"{stage.node_name} {stage.device}", stage.memory
    for share in plan.expert_shares:
        if not (share.is_coordinator and share.device == "CPU"):
            yield f"{share_name(share)} {share.device}", share.memory


def _memory_bar(memory: DeviceMemory) -> Text:
    sizes = (
        memory.weight_bytes,
        memory.kv_bytes,
        memory.recurrent_bytes,
        memory.checkpoint_bytes,
        memory.compute_bytes,
        memory.program_bytes,
        memory.reserve_bytes,
    )
    total = max(memory.available_bytes, sum(sizes), 1)
    text, done, cells = Text("  "), 0, 0
    for size, (_, style) in zip(sizes, _KINDS, strict=True):
        # Ends are rounded, not lengths, so that the bar is as long as the sum says.
        done += size
        end = round(done / total * WIDE_BAR_CELLS)
        text.append("█" * (end - cells), style)
        cells = end
    text.append("·" * (WIDE_BAR_CELLS - cells), "dim")
    return text


def _time_table(plan: Plan) -> Table:
    table = WholeTable(box=None, pad_edge=False, header_style="dim")
    for title in ("stage", "layers"):
        table.add_column(title)
    for title in ("memory", "network", ""):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    longest = max((s.compute_ms + s.network_ms for s in plan.stages), default=0.0) or 1.0
    for stage in plan.stages:
        share = (stage.compute_ms + stage.network_ms) / longest
        table.add_row(
            Text(f"{stage.node_name} {stage.device}"),
            layers_text(stage),
            f"{stage.compute_ms:.2f} ms",
            f"{stage.network_ms:.2f} ms",
            Text(bar(share, BAR_CELLS), "green"),
        )
    expected = plan.expectation
    if plan.expert_shares:
        table.add_row(
            "experts and dispatch",
            "",
            f"{expected.compute_ms - sum(s.compute_ms for s in plan.stages):.2f} ms",
            f"{expected.network_ms:.2f} ms",
        )
    table.add_row(
        Text("together", style="bold"),
        "",
        f"{expected.compute_ms:.2f} ms",
        f"{expected.network_ms:.2f} ms",
        f"{expected.token_ms:.2f} ms",
    )
    return table
