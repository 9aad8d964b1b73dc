"""Run a program of an engine for a moment, with a deadline and a bound on what it may say."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from linkcpp.engine.binaries import loader_environment
from linkcpp.engine.problems import crashed, missing_program, problem_of_start, timed_out
from linkcpp.engine.process_spec import clean_line
from linkcpp.engine.records import EngineLocation, EngineProblem

OUTPUT_LIMIT_BYTES = 2**20


class EngineProblemFound(Exception):  # noqa: N818 - a finding about an engine, not an error here
    """A look at an engine ended early because it found what is wrong with the engine."""

    def __init__(self, problem: EngineProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True)
class ProbeResult:
    """How a short run ended: exit code (minus the signal's number), stdout and stderr as one."""

    returncode: int
    output: str


def run_program(
    location: EngineLocation, program: Path, arguments: Sequence[str], *, deadline_seconds: float
) -> ProbeResult:
    """Run ``program`` to its end; output beyond ``OUTPUT_LIMIT_BYTES`` ends it.

    Raises:
        EngineProblemFound: it could not be started, did not end before the deadline, or prints too
            much.
    """
    environment = loader_environment(location)
    try:
        return _run([str(program), *arguments], environment, deadline_seconds)
    except subprocess.TimeoutExpired:
        doing = f"answer {arguments[0]}" if arguments else "end"
        raise EngineProblemFound(timed_out(program.name, doing, deadline_seconds)) from None
    except OSError as error:
        raise EngineProblemFound(start_problem(program, error)) from error


def start_problem(program: Path, error: OSError) -> EngineProblem:
    """Explain an ``OSError`` of starting ``program``."""
    if not program.exists():
        return missing_program(program.name, str(program.parent))
    return problem_of_start(program.name, error)


def _run(
    command: Sequence[str], environment: Mapping[str, str], deadline_seconds: float
) -> ProbeResult:
    ends = time.monotonic() + deadline_seconds
    # A session of its own: whatever the program starts can be ended with it.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        output = _read_until(process, ends)
        if len(output) > OUTPUT_LIMIT_BYTES:
            raise EngineProblemFound(crashed(f"{Path(command[0]).name} prints without end."))
        remaining = max(0.0, ends - time.monotonic())
        returncode = process.wait(timeout=remaining)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
    # What a program prints goes to a terminal in the end, in tables and error messages.
    lines = (clean_line(line) for line in output.decode(errors="replace").splitlines())
    return ProbeResult(returncode, "\n".join(lines))


def _read_until(process: "subprocess.Popen[bytes]", ends: float) -> bytes:
    """Collect output until the program ends, the deadline passes, or it says too much."""
    if process.stdout is None:
        return b""
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(output) <= OUTPUT_LIMIT_BYTES:
            if (remaining := ends - time.monotonic()) <= 0:
                break
            if not selector.select(timeout=min(remaining, 0.2)):
                # A child of the program may hold the pipe open after the program ended.
                if process.poll() is not None:
                    break
                continue
            if not (chunk := os.read(process.stdout.fileno(), 65536)):
                break
            output += chunk
    return bytes(output)
