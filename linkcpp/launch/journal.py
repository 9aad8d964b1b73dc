"""The supervisor's record of what happened: the state in its file, and lines in its log."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from linkcpp.common.errors import LinkcppError
from linkcpp.launch.events import (
    BytesCarried,
    Event,
    Logged,
    NodeFound,
    Noticed,
    PhaseEntered,
    ServerSeen,
    apply,
)
from linkcpp.launch.experts.events import FREQUENT_EVENTS
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.records import DeploymentState, Phase

log = logging.getLogger("linkcpp.launch")

# Progress comes many times a second; readers look only a few times. Once it serves, a deployment
# lives for weeks, and each write is synced to the disk.
PROGRESS_WRITE_SECONDS = 0.25
SERVING_WRITE_SECONDS = 2.0
_FREQUENT = (BytesCarried, Logged, NodeFound, ServerSeen, *FREQUENT_EVENTS)


class Journal:
    """Folds events into the state and keeps the state's file up to date.

    A disk that is full later does not end a deployment that serves: the state in memory goes on,
    and is written as soon as there is room again.
    """

    def __init__(self, folder: DeploymentFolder, state: DeploymentState) -> None:
        self.state = state
        self._folder = folder
        self._is_dirty = True
        self._cannot_write = False

    def emit(self, event: Event) -> None:
        """Take an event; all but mere progress is in the file when this returns."""
        before = self.state
        self.state = apply(before, event, now=time.time())
        _tell(event)
        # Renewals repeat what is known; only news is worth a write.
        self._is_dirty |= self.state != before.model_copy(
            update={"updated_at": self.state.updated_at}
        )
        if not isinstance(event, _FREQUENT):
            self.flush()

    def flush(self) -> None:
        """Write the state if it has changed since it was last written."""
        if not self._is_dirty:
            return
        try:
            self._folder.write_state(self.state)
        except LinkcppError as error:
            if not self._cannot_write:
                log.warning("the state cannot be written: %s", error)
            self._cannot_write = True
        else:
            self._is_dirty = self._cannot_write = False

    @contextlib.asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Write progress now and then while the block runs, and everything at its end."""
        task = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.flush()

    async def _keep(self) -> None:
        while True:
            is_serving = self.state.phase is Phase.READY
            await asyncio.sleep(SERVING_WRITE_SECONDS if is_serving else PROGRESS_WRITE_SECONDS)
            self.flush()


def _tell(event: Event) -> None:
    match event:
        case PhaseEntered(phase, detail):
            log.info("%s%s", phase.value.replace("_", " "), f": {detail}" if detail else "")
        case Noticed(text):
            log.info("%s", text)
        case _ if not isinstance(event, _FREQUENT):
            log.debug("%s", type(event).__name__)
        case _:
            pass
