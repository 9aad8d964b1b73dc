"""What the programs of a deployment said: its own log files, and those on the nodes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from linkcpp.cluster.token import load_token
from linkcpp.common.errors import LinkcppError
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.records import StageState
from linkcpp.node.client import NodeClient

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
    return {"supervisor": folder.supervisor_log, "llama-server": folder.engine_log}


def stages_of(folder: DeploymentFolder, node: str | None) -> list[StageState]:
    """Return the stages with an rpc-server, of one node if its name or id is given.

    Raises:
        LinkcppError: the deployment has no such node.
    """
    remote = [stage for stage in folder.read_state().stages if not stage.is_coordinator]
    if node is None:
        return remote
    chosen = [stage for stage in remote if node in (stage.node_name, stage.node_id)]
    if not chosen:
        names = ", ".join(sorted({stage.node_name for stage in remote})) or "none"
        raise LinkcppError(f"{node!r} is no node of {folder.name!r}.", hint=f"Nodes: {names}.")
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
    return tuple(text.splitlines()[-lines:]) if lines else ()


def local_tails(folder: DeploymentFolder, lines: int) -> Iterator[LogPart]:
    """Yield the end of each log file that lies here."""
    for source, path in local_logs(folder).items():
        yield LogPart(source, tail_of(path, lines))


async def remote_tail(stage: StageState, lines: int) -> LogPart:
    """Fetch the end of an rpc-server's log; where it cannot be had, the only line says why."""
    source = f"rpc-server {stage.node_name} {stage.device}"
    if stage.url is None or stage.server_id is None:
        return LogPart(source, ("(it was not started)",))
    try:
        async with NodeClient(stage.url, load_token(), timeout_seconds=NODE_SECONDS) as client:
            text = await client.logs(stage.server_id, tail=lines)
    except LinkcppError as error:
        return LogPart(source, (f"({error.message})",))
    return LogPart(source, tuple(text.splitlines()))


async def follow(folder: DeploymentFolder, stages: list[StageState]) -> AsyncIterator[LogPart]:
    """Yield new lines of the logs for ever: the files here, and the given rpc-servers' logs."""
    positions = {path: _size_of(path) for path in local_logs(folder).values()}
    seen = {stage.index: (await remote_tail(stage, 200)).lines for stage in stages}
    while True:
        await asyncio.sleep(FOLLOW_SECONDS)
        for source, path in local_logs(folder).items():
            if lines := _new_lines(path, positions):
                yield LogPart(source, lines)
        for stage in stages:
            part = await remote_tail(stage, 200)
            if fresh := added_lines(seen[stage.index], part.lines):
                yield LogPart(part.source, fresh)
            seen[stage.index] = part.lines


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
    position = positions[path] if positions[path] <= size else 0
    if position == size:
        return ()
    with path.open("rb") as file:
        file.seek(position)
        data = file.read(MAX_TAIL_BYTES)
    end = data.rfind(b"\n") + 1
    positions[path] = position + end
    return tuple(data[:end].decode(errors="replace").splitlines())
