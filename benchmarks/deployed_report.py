"""What ``deployed.py`` measured, as tables, and the targets that it is held to."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

from bulk import LINK
from rich.console import Console
from rich.table import Table

PREFILL_TOKENS = 500
MAX_OVER_DEVICE_MS = 0.15
MIN_OF_TLS = 0.6
DEPLOYED, ALONE, DEVICE, STOCK = "deployed", "monolithic", "bare device", "stock RPC"
# Whose processor time it is.
GROUPS = ENGINE, OWN, PLUMBING = "engine", "device and worker", "plumbing"
# What a deployment is compared with.
BESIDE = {"layers": STOCK, "experts": DEVICE}


class Target(NamedTuple):
    """What was reached, and the bound that it is held to."""

    name: str
    value: float
    bound: float
    is_least: bool = False

    def __str__(self) -> str:
        is_met = self.value >= self.bound if self.is_least else self.value <= self.bound
        side = "at least" if self.is_least else "at most"
        return (
            f"{'met' if is_met else 'MISSED'}: {self.name}: {self.value:.3f}, wanted {side} "
            f"{self.bound:.3f} ({100 * (self.value / self.bound - 1):+.0f} %)"
        )


def targets(results: dict[str, Any], before: dict[str, Any]) -> Iterator[Target]:
    """Yield each target of what was measured."""
    for count, found in results.get("experts", {}).items():
        more = found["setups"][DEPLOYED]["layer_ms_more"][0]
        name = f"experts over {count}, ms a layer over the bare device"
        yield Target(name, more, MAX_OVER_DEVICE_MS)
    if found := results.get("bulk"):
        yield Target("bulk, of TLS 1.3", found[LINK]["of_tls"][0], MIN_OF_TLS, is_least=True)
    for count, found in results.get("layers", {}).items():
        if known := before.get("layers", {}).get(count):
            for key in ("decode_ratio", "prefill_ratio"):
                now, then = (entry["setups"][DEPLOYED][key][0] for entry in (found, known))
                yield Target(
                    f"layers over {count}, {key.replace('_', ' ')} to stock RPC", now, then
                )


def show(results: dict[str, Any], before: dict[str, Any], file: TextIO) -> None:
    """Print the tables, and each target with what was reached; ``before`` is of another run."""
    out = Console(file=file, width=160)
    out.print(
        f"{results['cores']} cores, load {results['load_before']:.1f} before and "
        f"{results['load_after']:.1f} after; "
        f"{results['rounds']} rounds of {results['tokens']} tokens; median (least to most)"
    )
    for mode, beside in BESIDE.items():
        for count, found in results.get(mode, {}).items():
            _show_mode(out, f"{mode} over {count}, {found['layers']} layers", beside, found)
    if "bulk" in results:
        table = Table("bulk", "MB/s", "of TLS 1.3", "of TCP")
        for name, found in results["bulk"].items():
            keys = ("mb_per_second", "of_tls", "of_tcp")
            table.add_row(name, *(_in_words(found[key]) for key in keys))
        out.print(table)
    for target in targets(results, before):
        out.print(str(target))
    if "layers" in results and not before:
        out.print("layers no slower than before: not told without --before")


def _show_mode(out: Console, title: str, beside: str, found: dict[str, Any]) -> None:
    out.print(f"\n{title}")
    table = Table(
        "",
        "ms a token",
        "tokens/s",
        f"of {beside}",
        "ms a layer more",
        f"{PREFILL_TOKENS} tokens, ms",
        "tokens/s",
        f"of {beside}",
    )
    for name, row in found["setups"].items():
        table.add_row(
            name,
            _in_words(row["decode_ms"]),
            f"{1e3 / row['decode_ms'][0]:.1f}",
            _in_words(row["decode_ratio"]),
            _in_words(row["layer_ms_more"]),
            _in_words(row["prefill_ms"]),
            f"{PREFILL_TOKENS * 1e3 / row['prefill_ms'][0]:.0f}",
            _in_words(row["prefill_ratio"]),
        )
    out.print(table)
    table = Table("processor ms a token", "all", *GROUPS)
    for name, row in found["setups"].items():
        groups = row["cpu_ms"]
        total = sum(ms for programs in groups.values() for ms in programs.values())
        table.add_row(name, f"{total:.2f}", *(_listed(groups[group]) for group in GROUPS))
    out.print(table)


def _listed(programs: dict[str, float]) -> str:
    """Write a sum and what is in it."""
    parts = ", ".join(f"{name.split('.')[-1]} {ms:.2f}" for name, ms in programs.items() if ms)
    return f"{sum(programs.values()):.2f} ({parts})" if parts else ""


def _in_words(values: tuple[float, float, float]) -> str:
    places = max(0, 2 - math.floor(math.log10(max(abs(value) for value in values) or 1)))
    median, least, most = (f"{value:.{places}f}" for value in values)
    return f"{median} ({least} to {most})"
