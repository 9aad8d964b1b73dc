"""A loopback port at the coordinator that stands for an expert worker, also after a lost link."""

import asyncio
from typing import Self

from linkcpp.common.closing import AsyncClosing
from linkcpp.node.client import NodeClient
from linkcpp.node.connection import NodeError, NodeRefusedError, NodeUnreachableError
from linkcpp.node.records import WorkerId
from linkcpp.node.session import BridgeSession
from linkcpp.node.tunnel import HOST, Listener

_FIRST_RETRY_SECONDS = 0.2
_MAX_RETRY_SECONDS = 10.0


class WorkerTunnel(AsyncClosing):
    """Carries a virtual device's connection to ``127.0.0.1:port`` to the worker.

    A worker keeps no state of a client but its chains, which every connection sends anew. So a
    lost link is opened again, with growing pauses, behind the same port; meanwhile connections to
    it are dropped at once, which the virtual device takes as a worker that is away. Only when the
    node says that the worker is gone for good does ``wait_gone`` return.

    One connection is carried at a time; whoever wants another (a check beside the compute link)
    opens another tunnel.
    """

    def __init__(self, client: NodeClient, worker_id: WorkerId) -> None:
        self._client = client
        self._worker_id = worker_id
        self._listener = Listener()
        self._session: BridgeSession | None = None
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._keeper: asyncio.Task[None] | None = None
        self._earlier_sent_bytes = 0
        self._earlier_received_bytes = 0
        self.lost_reason: str | None = None
        self.reopen_count = 0

    @classmethod
    async def open(cls, client: NodeClient, worker_id: WorkerId) -> Self:
        """Bridge to the worker and listen on a free loopback port; ``client`` must stay open.

        Raises:
            NodeError: the node cannot be reached, or refuses the bridge.
        """
        tunnel = cls(client, worker_id)
        tunnel._use(BridgeSession(await client.open_worker_bridge(worker_id)))
        await tunnel._listener.open()
        tunnel._keeper = asyncio.create_task(tunnel._keep())
        return tunnel

    @property
    def port(self) -> int:
        """The loopback port; it stays the same."""
        return self._listener.port

    @property
    def endpoint(self) -> str:
        """Where the worker seems to be."""
        return f"{HOST}:{self.port}"

    @property
    def is_up(self) -> bool:
        """Whether the link holds now; ``lost_reason`` tells why it does not, or last did not."""
        return self._session is not None and self._session.lost_reason is None

    @property
    def sent_bytes(self) -> int:
        """Bytes carried to the node so far, over all links."""
        return self._earlier_sent_bytes + (self._session.sent_bytes if self._session else 0)

    @property
    def received_bytes(self) -> int:
        """Bytes carried from the node so far, over all links."""
        return self._earlier_received_bytes + (self._session.received_bytes if self._session else 0)

    async def wait_gone(self) -> str:
        """Wait until the worker is gone for good, and say why.

        Raises:
            asyncio.CancelledError: the tunnel was closed on purpose.
        """
        return await asyncio.shield(self._gone)

    async def aclose(self) -> None:
        """End the local connections, the port and the link; also fine when it is closed already."""
        self._listener.close()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._session is not None:
            await self._session.aclose()
        if not self._gone.done():
            self._gone.cancel()

    def _use(self, session: BridgeSession) -> None:
        self._session = self._listener.session = session

    async def _keep(self) -> None:
        while self._session is not None:
            self.lost_reason = await self._session.wait_lost()
            await self._leave(self._session)
            if (session := await self._reopened()) is None:
                self._listener.close()
                return
            self.reopen_count += 1
            self._use(session)

    async def _leave(self, session: BridgeSession) -> None:
        self._session = self._listener.session = None
        await session.aclose()
        self._earlier_sent_bytes += session.sent_bytes
        self._earlier_received_bytes += session.received_bytes

    async def _reopened(self) -> BridgeSession | None:
        """Bridge to the worker again; ``None`` where there is none any more."""
        pause_seconds = _FIRST_RETRY_SECONDS
        while True:
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_RETRY_SECONDS)
            try:
                # Somebody else may have the address by now: the token is shown after a new proof.
                await self._client.health()
                return BridgeSession(await self._client.open_worker_bridge(self._worker_id))
            except NodeUnreachableError as error:
                self.lost_reason = error.message
            except NodeRefusedError as error:
                self.lost_reason = error.message
                # The node may not have noticed yet that the old link is dead.
                if error.code != "already_bridged":
                    self._gone.set_result(error.message)
                    return None
            except NodeError as error:
                self.lost_reason = error.message
                self._gone.set_result(error.message)
                return None
