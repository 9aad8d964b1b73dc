"""A share of the coordinator's own: an rpc-server that the dispatch process itself drives."""

from linkcpp.cluster.limits import usable_cores
from linkcpp.common.errors import LinkcppError
from linkcpp.dispatch.control import NewServer
from linkcpp.engine.rpc_server import RunningRpcServer, start_rpc_server
from linkcpp.launch.experts.member import LINK_SECONDS, Linking, Member
from linkcpp.launch.experts.records import WorkerPhase
from linkcpp.launch.watch import first_result

_SLOWEST_LOAD_BYTES_PER_SECOND = 20e6


async def _end_of(server: RunningRpcServer) -> str:
    status = await server.process.wait()
    return f"its rpc-server {status.detail or 'stopped'}"


class OwnMember(Member):
    """A share of the coordinator's own."""

    async def _serve(self) -> str:
        around, share = self._around, self._share
        if not around.files.has_experts:
            raise LinkcppError(
                "The model here is hollow, so this machine cannot compute experts of its own.",
                hint="Name the whole model with --model.",
            )
        slabs = around.files.full_model
        if slabs is None:
            self._move(WorkerPhase.SLICING)
            slabs = await around.files.kept_slice(share.segments, lambda _: None)
        self._move(WorkerPhase.STARTING)
        server = await start_rpc_server(
            around.engine,
            device=share.device,
            log_path=around.folder / f"worker-{self._index}-rpc.log",
            threads=usable_cores(),
        )
        try:
            weight_bytes = share.memory.weight_bytes
            holder = NewServer(
                name=self._holder_name(),
                port=server.port,
                slabs=str(slabs),
                segments=share.segments,
            )
            load_seconds = LINK_SECONDS + weight_bytes / _SLOWEST_LOAD_BYTES_PER_SECOND
            linking = Linking(load_seconds, has_ended=lambda: server.process.status.state.is_final)
            async with self._joined(holder, None, weight_bytes, linking):
                return await first_result(_end_of(server), self._hang())
        finally:
            await server.process.stop()
