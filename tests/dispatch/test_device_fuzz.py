"""Requests that the virtual device refuses do not disturb the llama-server that it serves.

A graph at which ggml itself stops is passed on, and ends the device (see ``docs/security.md``).
"""

import contextlib
import socket
from pathlib import Path

import numpy as np
import psutil

from linkcpp.engine.records import EngineLocation
from linkcpp.engine.wire import Command, encode_request
from linkcpp.engine.wire_messages import PLAIN_TCP
from linkcpp.engine.wire_tensor import empty_tensors
from tests.dispatch.test_exactness import SHORT, even_shares, swarm
from tests.support import models
from tests.support.lengths import repeated
from tests.support.swarm import as_json

HELLO = encode_request(Command.HELLO, PLAIN_TCP)


def _hostile(random: np.random.Generator) -> bytes:
    """A request that is framed well and means nothing good."""
    tensor = empty_tensors(1)
    tensor["buffer"] = int(random.choice([0, 1, 1 << 48, 1 << 63]))
    tensor["data"] = int(random.integers(0, 1 << 62))
    tensor["ne"] = random.integers(0, 1 << 31, 4)
    tensor["nb"] = random.integers(0, 1 << 31, 4)
    tensor["type"] = int(random.integers(0, 60))
    tensor["op"] = int(random.integers(0, 120))
    tensor["name"] = random.choice([b"x", b"blk.0.ffn_up_exps.weight", b"\xff" * 64])
    record = tensor.tobytes()
    sizes = random.integers(0, 1 << 62, 2).astype("<u8").tobytes()
    graph = b"\0\0\0\0\1\0\0\0" + bytes(8) + b"\1\0\0\0" + record
    return bytes(
        random.choice(
            np.array(
                [
                    encode_request(Command.GET_TENSOR, record + sizes),
                    encode_request(Command.SET_TENSOR, record + sizes[:8] + b"data"),
                    encode_request(Command.COPY_TENSOR, record + record),
                    encode_request(Command.INIT_TENSOR, record),
                    encode_request(Command.SET_TENSOR_HASH, record + sizes),
                    encode_request(Command.GET_ALLOC_SIZE, bytes(4) + record * 11),
                    encode_request(Command.ALLOC_BUFFER, bytes(4) + sizes[:8]),
                    encode_request(Command.FREE_BUFFER, sizes[:8]),
                    encode_request(Command.BUFFER_CLEAR, sizes[:8] + b"x"),
                    encode_request(Command.GET_ALIGNMENT, b"\7\0\0\0"),
                    encode_request(Command.GRAPH_RECOMPUTE, bytes(4)),
                    encode_request(Command.GRAPH_COMPUTE, graph),
                    random.bytes(60),
                ],
                dtype=object,
            )
        )
    )


def test_clients_that_are_refused_leave_the_served_one_undisturbed(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    random = np.random.default_rng(11)
    model = models.qwen3moe()
    with swarm(stock_engine, model, even_shares(model, 1), tmp_path) as (device, server):
        wanted = as_json(server.complete(SHORT, 12))
        process = psutil.Process(device.running.process.pid)
        before = process.memory_info().rss
        for _ in range(repeated(150)):
            with socket.create_connection(("127.0.0.1", device.port), 10) as client:
                client.settimeout(0.02)
                with contextlib.suppress(OSError):
                    if random.random() < 0.9:
                        client.sendall(HELLO)
                        client.recv(100)
                    for _ in range(int(random.integers(1, 4))):
                        client.sendall(_hostile(random))
                    client.recv(1 << 16)
        assert as_json(server.complete(SHORT, 12)) == wanted
        assert process.memory_info().rss < before + 64 * 2**20
        assert device.status()["failed_pair_count"] == 0
        assert "defect" not in device.running.log.read_text()
