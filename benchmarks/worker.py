"""What a worker itself costs a token, without the matrix products of its rpc-server.

    python benchmarks/worker.py [--seconds 1.5] [--json]

The worker's service is real and on real sockets; behind it is an rpc-server that computes nothing
and answers zeros at once, before it a device that asks without pause, both in processes of their
own. Counted is the processor time of the worker's process alone, kernel included.
"""

import argparse
import json
import multiprocessing
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from linkcpp.engine import wire_messages as messages
from linkcpp.engine.ops import op_table_of_version
from linkcpp.engine.records import RpcVersion
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.engine.wire import DIALECT_4, Command, RequestParser, encode_answer
from linkcpp.worker.chain import Chain, ChainInput, ChainSource, ChainStep, SourceKind, WeightShape
from linkcpp.worker.compute import ExpertCompute
from linkcpp.worker.frames import (
    HEADER_BYTES,
    Compute,
    Limits,
    Numbers,
    Pairs,
    Welcome,
    pack_chain,
    pack_compute,
    pack_hello,
    parse_header,
)
from linkcpp.worker.plan import Weight
from linkcpp.worker.service import WorkerService
from linkcpp.worker.store import Group

MODELS = {
    "tiny": (64, 64, 8, 2),
    "SmolLM2 as a mixture": (576, 1536, 8, 2),
    "122B": (3072, 1024, 256, 8),
}
BATCHES = (1, 8, 64, 512)
VERSION = RpcVersion(major=4, minor=0, patch=3)
F32 = 0


class AllExperts:
    """A store of weights that nobody reads."""

    max_experts = 1 << 30

    def __init__(self, shapes: dict[str, WeightShape], experts: int) -> None:
        weights = {
            name: Weight(
                name.encode(),
                F32,
                (shape.width, shape.rows, experts, 1),
                (4, 4 * shape.width, 4 * shape.width * shape.rows, 4),
                1,
                1,
            )
            for name, shape in shapes.items()
        }
        self._group = Group((0,), weights, shapes)

    def locate(self, layer: int, expert_ids: Numbers) -> tuple[Group, Numbers]:
        """Hold everything."""
        return self._group, expert_ids

    def locate_few(self, layer: int, expert_ids: Sequence[int]) -> tuple[Group, Sequence[int]]:
        """Hold everything."""
        return self._group, expert_ids


def swiglu(hidden: int, inner: int) -> tuple[Chain, dict[str, WeightShape]]:
    """Return the usual expert function, and its weights."""
    names = {part: f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    weight = {part: ChainSource(kind=SourceKind.WEIGHT, weight=n) for part, n in names.items()}
    ids, row = ChainSource(kind=SourceKind.IDS), ChainSource(kind=SourceKind.INPUT)
    step = [ChainSource(kind=SourceKind.STEP, index=number) for number in range(3)]
    steps = (
        ChainStep(op="MUL_MAT_ID", width=inner, sources=(weight["gate"], row, ids)),
        ChainStep(op="MUL_MAT_ID", width=inner, sources=(weight["up"], row, ids)),
        ChainStep(op="GLU", width=inner, sources=(step[0], step[1]), function="SWIGLU"),
        ChainStep(op="MUL_MAT_ID", width=hidden, sources=(weight["down"], step[2], ids)),
    )
    shapes = {
        names["gate"]: WeightShape(hidden, inner),
        names["up"]: WeightShape(hidden, inner),
        names["down"]: WeightShape(inner, hidden),
    }
    return Chain(inputs=(ChainInput(width=hidden, per_pair=False),), steps=steps), shapes


def answer_zeros(listener: socket.socket) -> None:
    """Be an rpc-server that computes nothing."""
    link, _ = listener.accept()
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    parser = RequestParser(DIALECT_4)
    fixed = {
        Command.HELLO: messages.build_hello_answer(VERSION),
        Command.ALLOC_BUFFER: messages.ALLOCATED_BUFFER.build(messages.AllocatedBuffer(1, 1 << 40)),
        Command.BUFFER_GET_BASE: messages.NUMBER.build(messages.Number(1 << 40)),
        Command.FREE_BUFFER: b"",
    }
    zeros: dict[int, bytes] = {}
    buffer = memoryview(bytearray(1 << 20))
    while count := link.recv_into(buffer):
        for event in parser.feed(buffer[:count]):
            if event.command == Command.GET_TENSOR:  # type: ignore[union-attr]
                size = messages.GET_TENSOR.parse(event.payload).size_bytes  # type: ignore[union-attr]
                if size not in zeros:
                    zeros[size] = encode_answer(bytes(size))
                link.sendall(zeros[size])
            elif event.command in fixed:  # type: ignore[union-attr]
                link.sendall(encode_answer(fixed[event.command]))  # type: ignore[union-attr]


def ask(
    port: int, frame: bytes, chain: Chain, seconds: float, told: "multiprocessing.Queue[int]"
) -> None:
    """Be a device that asks the same again and again; tell how often, after a warm-up."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = memoryview(bytearray(1 << 20))

        def receive() -> None:
            head = b""
            while len(head) < HEADER_BYTES:
                head += link.recv(HEADER_BYTES - len(head))
            left = parse_header(head, Limits()).payload_bytes
            while left:
                left -= link.recv_into(buffer, min(left, len(buffer)))

        for request in (pack_hello("token"), pack_chain(0, 1, chain), *[frame] * 3):
            link.sendall(request)
            receive()
        told.put(0)
        count, end = 0, time.monotonic() + seconds
        while time.monotonic() < end or count < 3:
            link.sendall(frame)
            receive()
            count += 1
        told.put(count)


def request(dimensions: tuple[int, int, int, int], batch: int) -> bytes:
    """Return a COMPUTE frame for random experts."""
    hidden, _, experts, slots = dimensions
    random = np.random.default_rng(batch)
    chosen = np.concatenate([random.permutation(experts)[:slots] for _ in range(batch)])
    index = np.repeat(np.arange(batch, dtype=np.int32), slots)
    pairs = Pairs(0, index, chosen.astype(np.int32), (random.random((batch, hidden), np.float32),))
    return b"".join(bytes(part) for part in pack_compute(1, Compute(1, pairs)))


def measure(dimensions: tuple[int, int, int, int], batch: int, seconds: float) -> float:
    """Return the microseconds of processor time a token."""
    hidden, inner, experts, _ = dimensions
    chain, shapes = swiglu(hidden, inner)
    with socket.create_server(("127.0.0.1", 0)) as behind:
        engine = multiprocessing.Process(target=answer_zeros, args=(behind,), daemon=True)
        engine.start()
        rpc = RpcSocket(*behind.getsockname())
    store = AllExperts(shapes, experts)
    compute = ExpertCompute(rpc, op_table_of_version(VERSION), store)
    welcome = Welcome(
        model_digest="", hidden_size=hidden, segments=(), engine="", limits=Limits(), name="w"
    )
    service = WorkerService(compute, welcome, "token")
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=service.serve, args=(listener,), daemon=True).start()
    told: multiprocessing.Queue[int] = multiprocessing.Queue()
    frame = request(dimensions, batch)
    device = multiprocessing.Process(
        target=ask, args=(listener.getsockname()[1], frame, chain, seconds, told), daemon=True
    )
    device.start()
    told.get()
    before = resource.getrusage(resource.RUSAGE_SELF)
    count = told.get()
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    device.join()
    service.stop()
    rpc.close()
    engine.join()
    return used / count / batch * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3, help="the least of them counts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {
        name: {
            batch: min(measure(sizes, batch, options.seconds) for _ in range(options.rounds))
            for batch in BATCHES
        }
        for name, sizes in MODELS.items()
    }
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for name, found in results.items():
        parts = "  ".join(f"{batch}: {us:.2f} us" for batch, us in found.items())
        print(f"{name:22} a token at batch {parts}  ({found[1] / found[512]:.0f} times less)")


if __name__ == "__main__":
    main()
