"""What the programs of a deployment said: its own log files, and those on the nodes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.launch.experts.records import WorkerState
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.records import StageState
from linkcpp.node.client import NodeClient, NodeRefusedError
from linkcpp.node.connector import NodeConnector

FOLLOW_SECONDS = 0.5
NODE_SECONDS = 5.0
MAX_TAIL_BYTES = 4 * 2**20
_BYTES_A_LINE = 400


@dataclass(frozen=True)
class LogPart:
    """Some lines of one program; ``source`` names program and machine."""

    source: str
    lines: tuple[str, ...]


def local_logs(folder: DeploymentFolder) -> dict[str, Path]:
    """Return the log files that lie here, by what writes them."""
    always = {"supervisor": folder.supervisor_log, "llama-server": folder.engine_log}
    # Of mode experts.
    sometimes = {
        "dispatch": folder.dispatch_log,
        "front": folder.front_log,
        "backing rpc-server": folder.path / "backing.log",
        "fallback rpc-server": folder.path / "fallback.log",
        **{f"{path.stem} here": path for path in sorted(folder.path.glob("worker-*.log"))},
    }
    return {**always, **{name: path for name, path in sometimes.items() if path.exists()}}


Remote = StageState | WorkerState


def remote_programs(folder: DeploymentFolder, node: str | None) -> list[Remote]:
    """Return the rpc-servers and expert workers on nodes, of one if its name or id is given.

    Raises:
        LinkcppError: the deployment has no such node.
    """
    state = folder.read_state()
    workers = state.experts.workers if state.experts else ()
    programs: tuple[Remote, ...] = (*state.stages, *workers)
    remote = [entry for entry in programs if not entry.is_coordinator]
    if node is None:
        return remote
    chosen = [entry for entry in remote if node in (entry.node_name, entry.node_id)]
    if not chosen:
        names = ", ".join(sorted({entry.node_name for entry in remote})) or "none"
        raise LinkcppError(f"{node!r} is not a node of {folder.name!r}.", hint=f"Nodes: {names}.")
    return chosen


def tail_of(path: Path, lines: int) -> tuple[str, ...]:
    """Return the last lines of a file, nothing where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - min(MAX_TAIL_BYTES, lines * _BYTES_A_LINE)))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ()
    return _lines_of(text)[-lines:] if lines else ()


def local_tails(folder: DeploymentFolder, lines: int) -> Iterator[LogPart]:
    """Yield the end of each log file that lies here."""
    for source, path in local_logs(folder).items():
        yield LogPart(source, tail_of(path, lines))


async def remote_tail(program: Remote, lines: int) -> LogPart:
    """Fetch the end of a program's log; where it cannot be had, the only line says why."""
    kind = "rpc-server" if isinstance(program, StageState) else "worker"
    source = f"{kind} {program.node_name} {program.device}"
    if program.url is None:
        return LogPart(source, ("(it was not started)",))
    try:
        async with (
            contextlib.aclosing(NodeConnector()) as connector,
            await connector.open(program.url, timeout_seconds=NODE_SECONDS) as client,
        ):
            text = await _fetch(client, program, lines)
    except NodeRefusedError as error:
        is_gone = error.code in ("unknown_server", "unknown_worker")
        return LogPart(source, ("(already stopped)" if is_gone else f"({error.told})",))
    except LinkcppError as error:
        return LogPart(source, (f"({error.message})",))
    return LogPart(source, _lines_of(text))


async def _fetch(client: NodeClient, program: Remote, lines: int) -> str:
    if isinstance(program, StageState) and program.server_id is not None:
        return await client.logs(program.server_id, tail=lines)
    if isinstance(program, WorkerState) and program.worker_id is not None:
        return await client.worker_logs(program.worker_id, tail=lines)
    return "(it was not started)"


async def follow(folder: DeploymentFolder, programs: list[Remote]) -> AsyncIterator[LogPart]:
    """Yield new lines of the logs for ever: the files here, and the given programs' logs."""
    positions = {path: _size_of(path) for path in local_logs(folder).values()}
    seen = [(await remote_tail(program, 200)).lines for program in programs]
    while True:
        await asyncio.sleep(FOLLOW_SECONDS)
        for source, path in local_logs(folder).items():
            if lines := _new_lines(path, positions):
                yield LogPart(source, lines)
        for number, program in enumerate(programs):
            part = await remote_tail(program, 200)
            if fresh := added_lines(seen[number], part.lines):
                yield LogPart(part.source, fresh)
            seen[number] = part.lines


def added_lines(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a later tail of a log has beyond an earlier one. Pure."""
    for start in range(len(before) + 1):
        overlap = before[start:]
        if after[: len(overlap)] == overlap:
            return after[len(overlap) :]
    return after


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _new_lines(path: Path, positions: dict[Path, int]) -> tuple[str, ...]:
    size = _size_of(path)
    # A file that shrank was rotated, and is read from its new beginning.
    known = positions.get(path, 0)
    position = known if known <= size else 0
    if position == size:
        return ()
    with path.open("rb") as file:
        file.seek(position)
        data = file.read(MAX_TAIL_BYTES)
    end = data.rfind(b"\n") + 1
    positions[path] = position + end
    return _lines_of(data[:end].decode(errors="replace"))


def _lines_of(text: str) -> tuple[str, ...]:
    # Unicode has more ends of lines, but no program ends a line of its log with one of them.
    return tuple(text.removesuffix("\n").split("\n")) if text else ()
