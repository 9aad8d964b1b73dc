"""A gateway in a process of its own, on the event loop that ``linkcpp gateway`` uses.

``python -m tests.gateway.process PUBLIC_KEY`` prints its port and runs until its input ends.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

import uvloop

from linkcpp.common.descriptors import raise_descriptor_limit
from linkcpp.common.sockets import listen
from linkcpp.gateway.relay import Relay, RelayLimits
from linkcpp.gateway.server import serve_gateway
from linkcpp.registry.encoding import encode
from linkcpp.registry.tickets import HubKey
from tests.gateway.gateways import GATEWAY_ID, HUB_ID, METRICS_TOKEN, Gateway, Signer


@contextlib.contextmanager
def gateway_process() -> Iterator[Gateway]:
    signer = Signer()
    public_key = encode(signer.private.public_key().public_bytes_raw())
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gateway.process", public_key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        yield Gateway(int(process.stdout.readline()), signer, process_id=process.pid)
    finally:
        process.communicate()
    assert process.returncode == 0


async def _serve(public_key: str) -> None:
    raise_descriptor_limit(10_000)
    sockets = listen("127.0.0.1", 0)
    relay = Relay(
        gateway_id=GATEWAY_ID,
        hub=HubKey.parse(HUB_ID, public_key),
        limits=RelayLimits(unpaired_per_caller=4096),
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    print(sockets[0].getsockname()[1], flush=True)
    await serve_gateway(relay, METRICS_TOKEN, sockets, stop)


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
