"""The Python programs that a deployment runs here, as supervised processes."""

import asyncio
import contextlib
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import BaseModel

from linkcpp.common.files import write_atomically
from linkcpp.engine.process import SupervisedProcess
from linkcpp.engine.process_spec import ProcessSpec
from linkcpp.launch.failing import BrokenError

START_SECONDS = 120.0
STOP_SECONDS = 10.0


class Program:
    """A program that runs; ``ports`` are those that its ready line told."""

    def __init__(self, process: SupervisedProcess, ports: tuple[int, ...]) -> None:
        self.process = process
        self.ports = ports

    async def wait_for_end(self) -> str:
        """Wait until it ends by itself, and say how."""
        status = await self.process.wait()
        return f"{self.process.spec.name} {status.detail or 'stopped'}"

    async def stop(self) -> None:
        """End it and all that it started."""
        await self.process.stop()


async def start_program(
    module: str,
    config: BaseModel,
    *,
    name: str,
    config_path: Path,
    log_path: Path,
    ready_pattern: str,
    probe: Callable[[], Awaitable[bool]] | None = None,
) -> Program:
    """Start ``python -m MODULE CONFIG`` and wait until it is ready.

    ``probe`` tells whether it answers; without one a program hangs only where a signal stopped it.

    The configuration holds tokens, so it goes through a file that only the owner may read, and is
    removed once the program has read it.

    Raises:
        LinkcppError: it cannot be started, or ended at once.
    """
    ports: list[int] = []

    def take(line: str) -> None:
        if match := re.search(ready_pattern, line):
            ports[:] = [int(port) for port in match.groups()]

    text = config.model_dump_json()
    await asyncio.to_thread(write_atomically, config_path, text, mode=0o600)
    spec = ProcessSpec(
        name=name,
        argv=(sys.executable, "-P", "-m", module, str(config_path)),
        log_path=log_path,
        ready_pattern=ready_pattern,
        ready_timeout_seconds=START_SECONDS,
        stop_timeout_seconds=STOP_SECONDS,
    )
    process = SupervisedProcess(spec, on_line=take, probe=probe)
    try:
        await process.start_and_wait()
    finally:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(config_path.unlink)
    return Program(process, tuple(ports))


async def watch_program(program: Program) -> None:
    """Wait until a program ends by itself.

    Raises:
        BrokenError: it ended.
    """
    raise BrokenError(await program.wait_for_end())
