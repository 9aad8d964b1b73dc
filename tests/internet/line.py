"""A line that can be bad: ``python -m tests.internet.line PORT TARGET_PORT``, inside a namespace.

SIGUSR1 makes it lose pieces, and cut all connections whenever so many more bytes have passed;
SIGUSR2 makes it good. Every cut is a line of output.
"""

import asyncio
import signal
import sys

from tests.support.slow_relay import SlowRelay, slow_relay

LISTENS = "listens"
CUT = "cut"
_LOSS = 0.01
# Counted in bytes, so that something gets through between two cuts on the slowest machine.
_CUT_EVERY_BYTES = 1_000_000
_LOOK_SECONDS = 0.02


async def run(port: int, target_port: int) -> None:
    """Carry connections until SIGINT."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    async with slow_relay(target_port, port=port) as relay:
        loop.add_signal_handler(signal.SIGUSR1, lambda: setattr(relay, "loss", _LOSS))
        loop.add_signal_handler(signal.SIGUSR2, lambda: setattr(relay, "loss", 0.0))
        print(LISTENS, flush=True)
        cutting = asyncio.create_task(_cut_while_bad(relay))
        await stop.wait()
        cutting.cancel()


async def _cut_while_bad(relay: SlowRelay) -> None:
    cut_at_bytes = 0
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if not relay.loss:
            cut_at_bytes = relay.passed_bytes + _CUT_EVERY_BYTES
        elif relay.passed_bytes >= cut_at_bytes:
            print(f"{CUT} {relay.cut()} connections after {relay.passed_bytes} bytes", flush=True)
            cut_at_bytes += _CUT_EVERY_BYTES


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), int(sys.argv[2])))
