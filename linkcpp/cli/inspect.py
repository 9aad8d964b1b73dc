"""``linkcpp inspect``: what a model is made of, from its header or from a preset."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from linkcpp.cli.output import console, print_json, working
from linkcpp.cli.tables import WholeTable
from linkcpp.cli.verb import refuse_together, verb
from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.common.units import format_bytes
from linkcpp.model.memory import kv_bytes, kv_token_bytes, recurrent_bytes
from linkcpp.model.presets import expand_preset, presets
from linkcpp.model.records import LayerKind, ModelInventory
from linkcpp.model.summary import Summary, summarize
from linkcpp.registry.model_lookup import load_model_anywhere

DEFAULT_CONTEXT_TOKENS = 4096
BAR_CELLS = 24
_MAX_SOURCE_CHARACTERS = 4096
_EIGHTHS = " ▏▎▍▌▋▊▉"
_KIND_NAMES = {
    LayerKind.ATTENTION: "attention",
    LayerKind.RECURRENT: "recurrent",
    LayerKind.STATELESS: "without memory",
    LayerKind.NEXT_TOKEN: "next-token",
}

app = verb()


@app.command()
def inspect(
    model: Annotated[
        str | None,
        typer.Argument(help="A GGUF file, a part of a split one, an http(s) URL, or a preset."),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the presets that are known without a file.")
    ] = False,
    context: Annotated[
        int, typer.Option("-c", "--context", min=1, max=2**24, help="Tokens of context to size.")
    ] = DEFAULT_CONTEXT_TOKENS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="With --json: every tensor as well.")
    ] = False,
) -> None:
    """Show what a model is made of: layers, experts, bytes by role, memory per token."""
    refuse_together({"MODEL": model, "--list": show_list})
    if tensors and not as_json:
        raise LinkcppError("--tensors is for --json.", hint="Give --json as well, or omit it.")
    if show_list:
        _print_presets(as_json=as_json)
        return
    if model is None:
        raise LinkcppError(
            "There is no model to inspect.",
            hint="Name a GGUF file, a URL or a preset; `linkcpp inspect --list` shows the presets.",
        )
    with working("Reading the header…"):
        inventory = load_model_anywhere(model)
    if as_json:
        print_json(_as_data(inventory, context, with_tensors=tensors))
        return
    out = console()
    for block in _report(inventory, summarize(inventory), context):
        out.print(block)


def _as_data(inventory: ModelInventory, context: int, *, with_tensors: bool) -> dict[str, Any]:
    excluded = set() if with_tensors else {"tensors"}
    data: dict[str, Any] = inventory.model_dump(mode="json", exclude=excluded)
    data["summary"] = summarize(inventory).model_dump(mode="json")
    data["memory"] = _memory(inventory, context)
    return data


def _memory(inventory: ModelInventory, context: int) -> dict[str, int]:
    layers = inventory.layers
    return {
        "context_tokens": context,
        "kv_bytes_per_token": sum(kv_token_bytes(layer) for layer in layers),
        "kv_bytes_per_sequence": sum(kv_bytes(layer, context_tokens=context) for layer in layers),
        "recurrent_bytes_per_sequence": sum(recurrent_bytes(layer) for layer in layers),
    }


def _report(inventory: ModelInventory, summary: Summary, context: int) -> Iterator[RenderableType]:
    yield Text(inventory.name, style="bold")
    yield Padding(_facts(inventory, summary, context), (0, 0, 1, 0))
    yield _role_bars(summary)
    if inventory.notes:
        yield Padding(
            Group(*(Text.assemble(("• ", "yellow"), note) for note in inventory.notes)),
            (1, 0, 0, 0),
        )


def _facts(inventory: ModelInventory, summary: Summary, context: int) -> Table:
    shape = inventory.shape
    table = WholeTable.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    parts = f" in {inventory.part_count} parts" if inventory.part_count > 1 else ""
    table.add_row("source", Text(f"{printable(inventory.source, _MAX_SOURCE_CHARACTERS)}{parts}"))
    table.add_row(
        "size",
        f"{format_bytes(inventory.file_bytes)}, {format_count(summary.parameter_count)} parameters",
    )
    table.add_row("architecture", Text(shape.architecture))
    table.add_row("layers", _layer_text(inventory))
    table.add_row(
        "widths",
        f"hidden {shape.hidden_size:,}, vocabulary {shape.vocabulary_size:,}, "
        f"trained context {shape.context_length:,}",
    )
    if summary.expert_count:
        table.add_row("experts", _expert_text(inventory, summary))
    table.add_row("memory", _memory_text(inventory, context))
    types = ", ".join(
        f"{name} {size / inventory.weight_bytes:.0%}"
        if size * 200 >= inventory.weight_bytes
        else f"{name} <1%"
        for name, size in inventory.type_bytes.items()
    )
    table.add_row("types", types)
    return table


def _layer_text(inventory: ModelInventory) -> str:
    kinds = Counter(layer.kind for layer in inventory.layers)
    listed = ", ".join(f"{kinds[kind]} {name}" for kind, name in _KIND_NAMES.items() if kinds[kind])
    return f"{len(inventory.layers)}: {listed}"


def _expert_text(inventory: ModelInventory, summary: Summary) -> str:
    shape = inventory.shape
    per_layer = f"{shape.expert_count} a layer, {shape.experts_per_token} for each token"
    size = format_bytes(summary.smallest_expert_bytes)
    if summary.largest_expert_bytes != summary.smallest_expert_bytes:
        size = f"{size} to {format_bytes(summary.largest_expert_bytes)}"
    return (
        f"{summary.expert_count:,} of {size} ({per_layer}): {summary.expert_share:.0%} of all bytes"
    )


def _memory_text(inventory: ModelInventory, context: int) -> str:
    memory = _memory(inventory, context)
    text = (
        f"{format_bytes(memory['kv_bytes_per_token'])} a token, "
        f"{format_bytes(memory['kv_bytes_per_sequence'])} for {context:,} tokens (f16 KV cache)"
    )
    if recurrent := memory["recurrent_bytes_per_sequence"]:
        text += f"; {format_bytes(recurrent)} recurrent state a sequence"
    return text


def _role_bars(summary: Summary) -> Table:
    table = WholeTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("bytes by role")
    table.add_column("", no_wrap=True)
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    total = sum(summary.role_bytes.values())
    for role, size in summary.role_bytes.items():
        share = size / total
        percent = f"{share:.1%}" if share >= 0.001 else "<0.1%"
        color = "cyan" if role == "expert" else "green"
        table.add_row(
            role.replace("_", " "), Text(bar(share), style=color), format_bytes(size), percent
        )
    return table


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """A bar of ``share`` (0 to 1) of ``cells`` character cells, in eighths of a cell."""
    eighths = max(round(share * cells * 8), 1 if share > 0 else 0)
    whole, rest = divmod(min(eighths, cells * 8), 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(cells)


def format_count(count: int) -> str:
    """A number of parameters as models are named: ``124.6 B``, ``135 M``."""
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if count >= unit:
            value = count / unit
            return f"{value:.1f} {name}" if value < 1000 and name == "B" else f"{value:.0f} {name}"
    return f"{count:,}"


def _print_presets(*, as_json: bool) -> None:
    inventories = [(preset, expand_preset(preset)) for preset in presets()]
    if as_json:
        print_json(
            [
                {
                    "name": preset.name,
                    "aliases": preset.aliases,
                    "architecture": preset.architecture,
                    "weight_bytes": inventory.weight_bytes,
                    "sources": preset.sources,
                    "note": preset.note,
                }
                for preset, inventory in inventories
            ]
        )
        return
    table = WholeTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("name it as", "model", "architecture"):
        table.add_column(column)
    for column in ("size", "experts"):
        table.add_column(column, justify="right")
    for preset, inventory in inventories:
        experts = summarize(inventory).expert_count
        table.add_row(
            Text(preset.aliases[0], style="bold"),
            preset.name,
            preset.architecture,
            format_bytes(inventory.weight_bytes),
            f"{experts:,}" if experts else "dense",
        )
    console().print(table)
