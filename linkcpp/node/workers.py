"""The expert workers that an agent runs over the slices that it holds."""

import asyncio
import contextlib
import logging
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil

from linkcpp.cluster.measure import CPU
from linkcpp.cluster.records import NodeRecord
from linkcpp.common.callers import Headers
from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.common.http_server import TakeUpgrade
from linkcpp.common.processes import descendants_of
from linkcpp.common.text import printable
from linkcpp.common.units import format_bytes
from linkcpp.common.upgrade import UpgradeError, request_head
from linkcpp.engine.process import SupervisedProcess
from linkcpp.engine.process_spec import ProcessSpec
from linkcpp.engine.records import Engine
from linkcpp.link.introduced import new_key
from linkcpp.link.program import AcceptedEnd, hand_over, new_door, remove_door
from linkcpp.model.slices.segments import merge_segments
from linkcpp.node.limits import (
    RefusedError,
    check_request,
    max_data_bytes,
    worker_memory_bytes,
)
from linkcpp.node.managed_program import ManagedProgram, ProgramManager, cap_memory, resident_bytes
from linkcpp.node.records import (
    NewWorker,
    ServerState,
    WorkerId,
    WorkerRecord,
    WorkerRequest,
)
from linkcpp.node.slice_store import SliceStore
from linkcpp.node.stored_slice import StoredSlice
from linkcpp.registry.relay import DIRECT_PATH
from linkcpp.worker.frames import Limits
from linkcpp.worker.process import READY_PATTERN, WorkerConfig

# A compute link for each coordinator, and a few that probe or verify.
MAX_STREAMS = 8

_FRAME_BYTES = 32 * 2**20
# A frame that comes in, its rows, and the answer.
_BUFFER_BYTES = 3 * _FRAME_BYTES
_START_SECONDS = 60.0
_SLOWEST_LOAD_BYTES_PER_SECOND = 20e6
_IDLE_PROGRAM = "import linkcpp.worker.process, signal; print('ready', flush=True); signal.pause()"

_log = logging.getLogger(__name__)


class ManagedWorker(ManagedProgram):
    """One expert worker, from the request to its end."""

    def __init__(
        self,
        request: WorkerRequest,
        slices: Sequence[StoredSlice],
        *,
        memory_bytes: int,
        overhead_bytes: int,
        log_folder: Path,
    ) -> None:
        super().__init__(
            "expert worker",
            deployment=request.deployment,
            device=request.device,
            memory_bytes=memory_bytes,
            overhead_bytes=overhead_bytes,
            lease_seconds=request.lease_seconds,
            log_folder=log_folder,
        )
        self.request = request
        self.slices = slices
        self.token = secrets.token_urlsafe(32)
        own_key, self.link_key = new_key()
        self.link = AcceptedEnd(
            link_id=self.key, own_key=own_key, peer_key=request.link_key, door=new_door()
        )
        self.slab_bytes = sum(item.slab_bytes or 0 for item in slices)
        for item in slices:
            item.user_count += 1

    @property
    def server_log_path(self) -> Path:
        """What the worker's rpc-server prints."""
        return self.log_path.with_name(f"{self.key}-rpc.log")

    def log_paths(self) -> tuple[Path, ...]:
        """The files that tell what it printed."""
        return (self.server_log_path, self.log_path)

    def end(self, state: ServerState, detail: str) -> None:
        """Note the end; the slices may be deleted from then on."""
        was_alive = self.is_alive
        super().end(state, detail)
        if was_alive:
            remove_door(self.link.door)
            for item in self.slices:
                item.user_count -= 1
                item.touch()

    def record(self) -> WorkerRecord:
        """Tell how it stands."""
        return WorkerRecord(
            worker_id=WorkerId(self.key),
            deployment=self.deployment,
            slice_ids=self.request.slice_ids,
            model_digest=self.slices[0].model_digest,
            segments=merge_segments(entry for item in self.slices for entry in item.segments),
            device=self.device,
            memory_bytes=self.memory_bytes,
            slab_bytes=self.slab_bytes,
            state=self.state,
            detail=self.detail,
            stream_count=self.stream_count,
            resident_bytes=self.resident_bytes,
        )


class WorkerManager(ProgramManager[ManagedWorker]):
    """Starts workers within what the node offers.

    ``describe`` and ``promising`` are as in ``ServerManager``; ``server_overhead_bytes`` is what
    the rpc-server of a worker takes of the machine's memory besides its buffers. ``name`` is what
    the workers call themselves.
    """

    def __init__(
        self,
        engine: Engine,
        store: SliceStore,
        *,
        name: str,
        describe: Callable[[], Awaitable[NodeRecord]],
        promising: asyncio.Lock,
        server_overhead_bytes: int,
        log_folder: Path,
        max_threads: int,
    ) -> None:
        super().__init__("expert worker", "worker", max_streams=MAX_STREAMS)
        self._engine = engine
        self._store = store
        self._name = name
        self._describe = describe
        self._promising = promising
        self._server_overhead_bytes = server_overhead_bytes
        self._log_folder = log_folder
        self._max_threads = max_threads
        self._program_bytes: int | None = None

    def records(self) -> tuple[WorkerRecord, ...]:
        """List the workers, ended ones included as long as they are remembered."""
        return tuple(worker.record() for worker in self._items.values())

    def renew(self, worker_id: WorkerId) -> WorkerRecord:
        """Start a worker's lease again."""
        worker = self.get(worker_id)
        worker.renew()
        return worker.record()

    async def create(self, request: WorkerRequest, peer: str) -> NewWorker:
        """Start a worker for ``peer``; its record tells when it is ready.

        Raises:
            RefusedError: a slice is not there, no such device, too little memory, or no working
                engine.
        """
        worker = await self._promise(request)
        _log.info(
            "%s starts an expert worker for %s on %s with %s of experts",
            peer,
            printable(request.deployment),
            request.device,
            format_bytes(worker.slab_bytes),
        )
        start = asyncio.create_task(self._start(worker))
        self._watches.add(start)
        start.add_done_callback(self._watches.discard)
        return NewWorker(worker=worker.record(), token=worker.token, link_key=worker.link_key)

    def take_link(self, path: str) -> TakeUpgrade | None:
        """Say who takes connections at a path: the worker whose link it names."""
        prefix = f"{DIRECT_PATH}/"
        if not path.startswith(prefix):
            return None

        def take(
            transport: asyncio.Transport, *, method: bytes, headers: Headers, peer: str
        ) -> None:
            worker = self._items.get(path.removeprefix(prefix))
            raw = transport.get_extra_info("socket")
            if raw is None or worker is None or worker.state is not ServerState.READY:
                raise UpgradeError(404, "no_such_link", "This node has no such link.")
            try:
                hand_over(raw, request_head(method, headers), worker.link.door)
            except OSError:
                raise UpgradeError(503, "busy", "The program takes no connection now.") from None
            # This process has no further use for it; the connection lives on in the other one.
            transport.abort()

        return take

    async def overhead_bytes(self) -> int:
        """Measure what a worker costs besides what it is promised; once, by starting its program.

        Raises:
            LinkcppError: the program does not start.
        """
        if self._program_bytes is None:
            self._program_bytes = await _measure_program(self._log_folder / "measure-worker.log")
        return self._server_overhead_bytes + self._program_bytes + _BUFFER_BYTES

    async def _promise(self, request: WorkerRequest) -> ManagedWorker:
        async with self._promising:
            self._check_open()
            overhead_bytes = await self.overhead_bytes()
            node = await self._describe()
            slices = self._store.ready(request.slice_ids)
            if len({item.model_digest for item in slices}) > 1:
                raise RefusedError(
                    422,
                    "several_models",
                    "These slices are of different models.",
                    hint="Ask for one worker a model.",
                )
            slab_bytes = sum(item.slab_bytes or 0 for item in slices)
            memory_bytes = worker_memory_bytes(request.memory_bytes, slab_bytes)
            # What a node offers leaves out the overhead of one more rpc-server already.
            besides = overhead_bytes - self._server_overhead_bytes if request.device == CPU else 0
            check_request(request.device, memory_bytes + besides, node, served=self.deployments())
            worker = ManagedWorker(
                request,
                slices,
                memory_bytes=memory_bytes,
                overhead_bytes=overhead_bytes,
                log_folder=self._log_folder,
            )
            self._add(worker)
            return worker

    async def _start(self, worker: ManagedWorker) -> None:
        path = worker.log_path.with_name(f"{worker.key}.json")
        try:
            # The token would be seen by everybody on a command line.
            text = self._config(worker).model_dump_json()
            await asyncio.to_thread(write_atomically, path, text, mode=0o600)
            if not worker.is_alive:
                return
            process = SupervisedProcess(
                self._spec(worker, path), on_line=lambda line: _note_port(worker, line)
            )
            worker.process = process
            process.start()
            await process.wait_ready()
        except LinkcppError as error:
            if worker.is_alive:
                _log.warning("%s did not start: %s", worker.label, error.message)
            worker.end(ServerState.FAILED, error.message)
            return
        except BaseException:
            worker.end(ServerState.FAILED, "the start was given up")
            raise
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        if worker.is_alive and process.pid is not None:
            worker.descendants = await asyncio.to_thread(descendants_of, process.pid)
            self._cap(worker)
        if worker.is_alive:
            self._become_ready(worker, process)

    def _config(self, worker: ManagedWorker) -> WorkerConfig:
        first, *more = (str(item.path) for item in worker.slices)
        return WorkerConfig(
            name=self._name,
            engine=self._engine.location,
            slabs=first,
            more_slabs=tuple(more),
            token=worker.token,
            log_path=worker.server_log_path,
            device=worker.device,
            threads=self._threads(worker),
            scratch_bytes=worker.memory_bytes - worker.slab_bytes,
            limits=_limits(worker.slices),
            link=worker.link,
        )

    def _spec(self, worker: ManagedWorker, config_path: Path) -> ProcessSpec:
        return ProcessSpec(
            name="the expert worker",
            argv=(sys.executable, "-P", "-m", "linkcpp.worker", str(config_path)),
            log_path=worker.log_path,
            ready_pattern=READY_PATTERN,
            ready_timeout_seconds=_START_SECONDS
            + worker.slab_bytes / _SLOWEST_LOAD_BYTES_PER_SECOND,
            stop_timeout_seconds=10.0,
        )

    def _threads(self, worker: ManagedWorker) -> int:
        # What the node's owner gives is the bound of what anybody may ask for.
        return min(worker.request.threads or self._max_threads, self._max_threads)

    def _cap(self, worker: ManagedWorker) -> None:
        """Hold the worker's rpc-server, which has its slabs now, to what it may still take."""
        scratch_bytes = worker.memory_bytes - worker.slab_bytes
        for descendant in worker.descendants:
            with contextlib.suppress(psutil.Error):
                if descendant.cmdline()[:1] == [str(self._engine.location.rpc_server)]:
                    most = max_data_bytes(scratch_bytes, self._threads(worker))
                    cap_memory(descendant.pid, worker.device, most)


def _note_port(worker: ManagedWorker, line: str) -> None:
    if match := re.search(READY_PATTERN, line):
        worker.port = int(match[1])


def _limits(slices: Sequence[StoredSlice]) -> Limits:
    """Bound one request so that neither its rows nor its answer are beyond a frame."""
    manifests = [item.manifest for item in slices if item.manifest is not None]
    tensors = [tensor for manifest in manifests for tensor in manifest.tensors]
    widest = max(extent for tensor in tensors for extent in tensor.shape[:-1])
    most = max(_FRAME_BYTES // (4 * widest), 1)
    return Limits(frame_bytes=_FRAME_BYTES, rows=most, pairs=most)


async def _measure_program(log_path: Path) -> int:
    spec = ProcessSpec(
        name="the worker program",
        argv=(sys.executable, "-P", "-c", _IDLE_PROGRAM),
        log_path=log_path,
        ready_pattern="^ready",
    )
    process = SupervisedProcess(spec)
    process.start()
    try:
        await process.wait_ready()
        return resident_bytes(process)
    finally:
        await process.stop()
