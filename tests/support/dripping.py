"""A stranger who holds connections with requests whose heads never end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

BEGUN = b"GET / HTTP/1.1\r\nHost: x\r\nX-Endless: "
_DRIP_SECONDS = 0.5


@contextlib.asynccontextmanager
async def dripping(port: int, count: int, said: bytes = BEGUN) -> AsyncIterator[None]:
    """Hold ``count`` connections to a port of loopback, each made anew when it is dropped.

    ``said`` is how each begins; a byte follows now and then.
    """
    begun = 0
    all_begun = asyncio.Event()

    async def hold() -> None:
        nonlocal begun
        is_first = True
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                begun += is_first
                is_first = False
                if begun == count:
                    all_begun.set()
                try:
                    while True:
                        await asyncio.sleep(_DRIP_SECONDS)
                        writer.write(b"a")
                        await writer.drain()
                finally:
                    writer.close()
            await asyncio.sleep(_DRIP_SECONDS)

    holding = [asyncio.create_task(hold()) for _ in range(count)]
    try:
        await all_begun.wait()
        yield
    finally:
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
