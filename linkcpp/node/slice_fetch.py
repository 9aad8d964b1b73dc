"""One run of the program that fetches a slice, as the agent sees it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, Protocol

from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.common.request_ids import current_request_id
from linkcpp.engine.process import SupervisedProcess
from linkcpp.engine.process_spec import ProcessSpec, ProcessStatus
from linkcpp.model.web_source import TOKEN_VARIABLE
from linkcpp.node.records import SliceRequest
from linkcpp.node.slice_fetcher import FetchConfig, FetchNews
from linkcpp.registry.secret_file import SECRET_MODE

RENEW_SECONDS: Final = 10.0


class HubTokens(Protocol):
    """The hub that this node joined, and this node's token for it, which is renewed in time."""

    url: str

    async def token(self) -> str:
        """Return a token that is valid for a while; raises ``LinkcppError``."""
        ...


class TooLargeError(LinkcppError):
    """The slice has ``file_bytes``, which are more than it may have."""

    def __init__(self, message: str, file_bytes: int) -> None:
        super().__init__(message)
        self.file_bytes = file_bytes


class Fetch:
    """Fetches ``output`` once; what an earlier run left is used."""

    def __init__(
        self, request: SliceRequest, output: Path, log_path: Path, hub: HubTokens | None
    ) -> None:
        self._request = request
        self._output = output
        self._log_path = log_path
        self._hub = hub if request.hub_model is not None else None

    async def run(self, max_bytes: int) -> AsyncIterator[FetchNews]:
        """Run the program and yield what it tells; it ends with the iteration.

        Raises:
            LinkcppError: the slice was not fetched, and why.
        """
        async with self._token_file() as token_path:
            async for news in self._run(self._config(max_bytes, token_path)):
                yield news

    def _config(self, max_bytes: int, token_path: Path | None) -> FetchConfig:
        if self._request.hub_model is not None and self._hub is None:
            raise LinkcppError(
                "The slice is to come from a hub, but this node joined none.",
                hint="`linkcpp join URL --token …` joins one.",
            )
        return FetchConfig(
            request=self._request,
            output=self._output,
            max_bytes=max_bytes,
            hub_url=self._hub.url if self._hub else None,
            token_path=token_path,
            request_id=current_request_id(),
        )

    @contextlib.asynccontextmanager
    async def _token_file(self) -> AsyncIterator[Path | None]:
        """Keep a file with the token of the day for as long as the program runs."""
        if self._hub is None:
            yield None
            return
        path = self._output.with_name("fetch-token")
        token = await self._hub.token()
        await asyncio.to_thread(write_atomically, path, token, mode=SECRET_MODE)
        renewing = asyncio.create_task(_keep_fresh(self._hub, path, token))
        try:
            yield path
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            with contextlib.suppress(OSError):
                path.unlink()

    async def _run(self, config: FetchConfig) -> AsyncIterator[FetchNews]:
        path = self._output.with_name("fetch.json")
        # The address may hold secrets, which a command line would show to everybody.
        await asyncio.to_thread(write_atomically, path, config.model_dump_json(), mode=SECRET_MODE)
        spec = ProcessSpec(
            name="the fetching of a slice",
            argv=(sys.executable, "-P", "-m", "linkcpp.node.slice_fetcher", str(path)),
            log_path=self._log_path,
            # Somebody else chose the address: the owner's token must not go there.
            environment={TOKEN_VARIABLE: ""},
            stop_timeout_seconds=2.0,
        )
        lines: asyncio.Queue[str | None] = asyncio.Queue()

        def notice_end(status: ProcessStatus) -> None:
            if status.state.is_final:
                lines.put_nowait(None)

        process = SupervisedProcess(spec, on_line=lines.put_nowait, on_change=notice_end)
        try:
            process.start()
            while (line := await lines.get()) is not None:
                news = _parse(line)
                if news is None:
                    continue
                if news.error is not None:
                    if news.needed_bytes is not None:
                        raise TooLargeError(news.error, news.needed_bytes)
                    raise LinkcppError(news.error)
                yield news
                if news.is_done:
                    return
            status = await process.wait()
            raise LinkcppError(f"The fetching of the slice {status.detail or status.state}.")
        finally:
            await process.stop()
            with contextlib.suppress(OSError):
                path.unlink()


async def _keep_fresh(hub: HubTokens, path: Path, token: str) -> None:
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        with contextlib.suppress(LinkcppError):  # the hub may come back; the old one may still do
            fresh = await hub.token()
            if fresh != token:
                await asyncio.to_thread(write_atomically, path, fresh, mode=SECRET_MODE)
                token = fresh


def _parse(line: str) -> FetchNews | None:
    try:
        return FetchNews.model_validate_json(line)
    except ValidationError:
        return None
