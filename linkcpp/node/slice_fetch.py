"""One run of the program that fetches a slice, as the agent sees it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.engine.process import SupervisedProcess
from linkcpp.engine.process_spec import ProcessSpec
from linkcpp.model.web_source import TOKEN_VARIABLE
from linkcpp.node.fetching import FetchConfig, FetchNews
from linkcpp.node.records import SliceRequest


class Fetch:
    """Fetches ``output`` once; what an earlier run left is used."""

    def __init__(self, request: SliceRequest, output: Path, log_path: Path) -> None:
        self._request = request
        self._output = output
        self._log_path = log_path

    async def run(self, most_bytes: int) -> AsyncIterator[FetchNews]:
        """Run the program and yield what it tells; it ends with the iteration.

        Raises:
            LinkcppError: the slice was not fetched, and why.
        """
        config = FetchConfig(request=self._request, output=self._output, most_bytes=most_bytes)
        path = self._output.with_name("fetch.json")
        # The address may hold secrets, which a command line would show to everybody.
        await asyncio.to_thread(write_atomically, path, config.model_dump_json(), mode=0o600)
        spec = ProcessSpec(
            name="the fetching of a slice",
            argv=(sys.executable, "-P", "-m", "linkcpp.node.fetching", str(path)),
            log_path=self._log_path,
            # Somebody else chose the address: the owner's token must not go there.
            environment={TOKEN_VARIABLE: ""},
            stop_timeout_seconds=2.0,
        )
        process = SupervisedProcess(spec)
        try:
            process.start()
            async for line in process.lines():
                news = _parse(line)
                if news is None:
                    continue
                if news.error is not None:
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


def _parse(line: str) -> FetchNews | None:
    try:
        return FetchNews.model_validate_json(line)
    except ValidationError:
        return None
