"""Opens an edge and says which way it takes: ``python -m tests.internet.way URL``."""

import asyncio
import contextlib
import sys

from linkcpp.node.connector import NodeConnector


async def main(url: str) -> None:
    async with contextlib.aclosing(NodeConnector()) as reach, await reach.open(url) as client:
        await client.node()
        print(client.way(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
