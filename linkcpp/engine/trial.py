"""One real run of an engine: its rpc-server holds one layer, its llama-server the other."""

import asyncio
import contextlib
import re
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from linkcpp.common.errors import LinkcppError
from linkcpp.common.network_errors import in_words
from linkcpp.common.sockets import free_port
from linkcpp.engine.problems import crashed, no_rpc, problem_of_exit, timed_out
from linkcpp.engine.process import SupervisedProcess
from linkcpp.engine.process_spec import ProcessSpec, ProcessState
from linkcpp.engine.records import EngineLocation, EngineProblem, RpcVersion
from linkcpp.engine.tiny_model import LAYER_COUNT, tiny_model
from linkcpp.engine.wire import ANSWER_SIZE, DIALECT_7, Command, WireError, encode_request
from linkcpp.engine.wire_messages import PLAIN_TCP, parse_hello_answer

_LOOPBACK = "127.0.0.1"
_TRIES = 3
_HELLO_ANSWER_BYTES = DIALECT_7.answer_bytes[Command.HELLO]
_POLL_SECONDS = 0.03
# An rpc-server that dies takes the llama-server with it, which may be noticed a moment earlier.
_SETTLE_SECONDS = 0.3
_PORT_TAKEN = re.compile(r"address already in use|couldn't bind|failed to create server", re.I)
_DIED = re.compile(r"died of (SIG\w+)|exited with (\d+)")


@dataclass(frozen=True)
class TrialLimits:
    """How long each step may take; the first use of a GPU compiles its kernels."""

    start_seconds: float = 30.0
    load_seconds: float = 60.0
    answer_seconds: float = 30.0


@dataclass(frozen=True)
class Trial:
    """What a run found; ``problem`` is ``None`` where the engine answered."""

    rpc_version: RpcVersion | None
    problem: EngineProblem | None


def run_trial(
    location: EngineLocation, server: Path, rpc_server: Path, limits: TrialLimits | None = None
) -> Trial:
    """Start a fresh rpc-server, ask its version, run the tiny model over it, stop both.

    Blocking, and not to be called where an event loop runs. Whatever way this process ends, both
    programs end with it.

    Raises:
        LinkcppError: the tiny model cannot be written.
    """
    model = tiny_model()
    return asyncio.run(_try_again(location, server, rpc_server, model, limits or TrialLimits()))


async def _try_again(
    location: EngineLocation, server: Path, rpc_server: Path, model: Path, limits: TrialLimits
) -> Trial:
    for _ in range(_TRIES):
        with tempfile.TemporaryDirectory(prefix="linkcpp-check-") as folder:
            run = _Run(location, Path(folder), limits)
            trial = await run.run(server, rpc_server, model)
        if trial.problem is None or not run.lost_a_port():
            break
    return trial


async def read_hello(host: str, port: int, timeout_seconds: float = 10.0) -> RpcVersion:
    """Ask an idle rpc-server for its protocol version, also one that linkcpp does not speak.

    Raises:
        WireError: nothing answers there, or it does not speak ggml-RPC.
    """
    address = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(encode_request(Command.HELLO, PLAIN_TCP))
                (size_bytes,) = ANSWER_SIZE.unpack(await reader.readexactly(ANSWER_SIZE.size))
                if size_bytes != _HELLO_ANSWER_BYTES:
                    told = f"{size_bytes} bytes instead of {_HELLO_ANSWER_BYTES}"
                    raise WireError(f"{address} answered HELLO with {told}.")
                return parse_hello_answer(await reader.readexactly(size_bytes))
            finally:
                writer.close()
    except TimeoutError as error:
        raise WireError(f"{address} did not answer HELLO within {timeout_seconds:g} s.") from error
    except asyncio.IncompleteReadError as error:
        raise WireError(f"{address} closed the connection at HELLO.") from error
    except OSError as error:
        raise WireError(f"Cannot connect to {address}: {error.strerror or error}.") from error


class _Failed(Exception):  # noqa: N818 - a finding about the engine, not an error here
    def __init__(self, problem: EngineProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class _Run:
    """The two programs of one trial."""

    def __init__(self, location: EngineLocation, folder: Path, limits: TrialLimits) -> None:
        self._location = location
        self._folder = folder
        self._limits = limits
        self._processes: list[SupervisedProcess] = []
        self._version: RpcVersion | None = None

    async def run(self, server: Path, rpc_server: Path, model: Path) -> Trial:
        try:
            rpc_port = free_port()
            options = ("--host", _LOOPBACK, "--port", str(rpc_port))
            async with self._running(rpc_server, options, rpc_port):
                self._version = await self._greet(rpc_port)
                await self._answer_once(server, model, rpc_port)
        except _Failed as failed:
            return Trial(self._version, failed.problem)
        return Trial(self._version, None)

    def lost_a_port(self) -> bool:
        """Whether another program took a port between our look and our program's start."""
        lines = [line for process in self._processes for line in process.recent_lines]
        return any(_PORT_TAKEN.search(line) for line in lines)

    async def _greet(self, port: int) -> RpcVersion:
        try:
            return await read_hello(_LOOPBACK, port, self._limits.start_seconds)
        except WireError as error:
            await self._raise_if_ended()
            raise _Failed(no_rpc(f"The rpc-server does not greet: {error.message}")) from error

    async def _answer_once(self, server: Path, model: Path, rpc_port: int) -> None:
        port = free_port()
        # A key of its own wins over one in the environment, and keeps other users out.
        key = secrets.token_hex(16)
        options = (
            *("--model", str(model), "--host", _LOOPBACK, "--port", str(port), "--api-key", key),
            # One layer and the output matrix go to the rpc-server, the first layer stays.
            *("--rpc", f"{_LOOPBACK}:{rpc_port}", "--device", "RPC0"),
            *("--n-gpu-layers", str(LAYER_COUNT)),
            *("--ctx-size", "256", "--parallel", "1", "--threads", "1", "--fit", "off"),
        )
        async with (
            self._running(server, options, port) as process,
            # No proxy of the environment stands between two ends of the loopback interface. The
            # client's own deadline is not to come first: ours names the step.
            httpx.AsyncClient(
                trust_env=False,
                base_url=f"http://{_LOOPBACK}:{port}",
                timeout=2 * self._limits.answer_seconds,
            ) as client,
        ):
            limits = self._limits
            await _within(
                limits.load_seconds, server, "load a tiny model", self._load(client, process)
            )
            await _within(limits.answer_seconds, server, "answer", self._complete(client, key))

    async def _load(self, client: httpx.AsyncClient, process: SupervisedProcess) -> None:
        while True:
            if process.status.state.is_final:
                await self._raise_if_ended()
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/health")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(_POLL_SECONDS)

    async def _complete(self, client: httpx.AsyncClient, key: str) -> None:
        try:
            answer = await client.post(
                "/completion",
                json={"prompt": "the", "n_predict": 4, "temperature": 0},
                headers={"Authorization": f"Bearer {key}"},
            )
            if answer.status_code != httpx.codes.OK or "content" not in answer.json():
                raise _Failed(crashed(f"llama-server answers {answer.status_code} to a prompt."))
        except (httpx.HTTPError, ValueError) as error:
            await self._raise_if_ended()
            reason = f"llama-server does not answer a prompt: {in_words(error)}."
            raise _Failed(crashed(reason)) from error

    @asynccontextmanager
    async def _running(
        self, program: Path, options: tuple[str, ...], port: int
    ) -> AsyncIterator[SupervisedProcess]:
        limit = self._limits.start_seconds
        process = SupervisedProcess(
            ProcessSpec(
                name=program.name,
                argv=(str(program), *options),
                log_path=self._folder / f"{program.name}.log",
                library_folders=self._location.library_folders,
                ready_port=port,
                # The deadline is ours, so that a late program is told from one that failed.
                ready_timeout_seconds=2 * limit,
                stop_timeout_seconds=2.0,
            )
        )
        self._processes.append(process)
        process.start()
        try:
            await _within(limit, program, "start", self._ready(process))
            yield process
        finally:
            await process.stop()

    async def _ready(self, process: SupervisedProcess) -> None:
        try:
            await process.wait_ready()
        except LinkcppError as error:
            await self._raise_if_ended()
            raise _Failed(crashed(error.message)) from error

    async def _raise_if_ended(self) -> None:
        """Name the program that ended first: the rpc-server's end is the llama-server's too."""
        await asyncio.sleep(_SETTLE_SECONDS)
        for process in self._processes:
            status = process.status
            if status.state is ProcessState.FAILED:
                code = _exit_code(status.detail or "")
                output = "\n".join(process.recent_lines)
                raise _Failed(problem_of_exit(process.spec.name, code, output))


async def _within(seconds: float, program: Path, doing: str, step: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await step
    except TimeoutError:
        raise _Failed(timed_out(program.name, doing, seconds)) from None


def _exit_code(detail: str) -> int:
    """Read the exit code (minus the signal's number) off a supervised process's ``detail``."""
    match = _DIED.search(detail)
    if match is None:
        return 1
    return int(match[2]) if match[2] else -signal.Signals[match[1]]
