"""The programs of a benchmark, and the processor time of each: found by their ``LINKCPP_HOME``."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil


def programs_below(folder: Path) -> list[tuple[str, psutil.Process]]:
    """List what runs with a home at or below a folder; each is named ``home: program``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            home = Path(process.environ().get("LINKCPP_HOME", "/"))
            if home.is_relative_to(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append((f"{home.name}: {_program(process.cmdline())}", process))
    return found


def cpu_seconds(folder: Path) -> dict[str, float]:
    """Return the processor seconds so far of all programs below a folder, summed by their names."""
    found: dict[str, float] = {}
    for name, process in programs_below(folder):
        with contextlib.suppress(psutil.Error):
            found[name] = found.get(name, 0.0) + sum(process.cpu_times()[:2])
    return found


def _program(words: Sequence[str]) -> str:
    program = Path(words[0]).name
    if not program.startswith("python"):
        return program
    if "-m" not in words:
        return "keeper" if any(word.endswith("keeper.py") for word in words) else program
    module, *rest = words[words.index("-m") + 1 :]
    return f"linkcpp {rest[0]}" if module == "linkcpp.cli.main" and rest else module
