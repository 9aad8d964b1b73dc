"""An rpc-server as a holder: right rows and no standstill, however it is asked and left."""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from linkcpp.dispatch.holder import Holder, LinkState, wait_for_links
from linkcpp.dispatch.job import Job
from linkcpp.dispatch.server_holder import ServerAddress
from linkcpp.dispatch.swarm import Swarm
from linkcpp.dispatch.swarm_state import SwarmOptions
from linkcpp.engine.ops import read_op_table
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.worker.chain import KeyedChain
from linkcpp.worker.compute import ExpertCompute
from linkcpp.worker.frames import Buffer, FrameError, Pairs, TokenPairs
from linkcpp.worker.slabs import GgufSlabs
from linkcpp.worker.store import LoadedSlabs
from tests.dispatch.test_exactness import even_shares, expert_counts
from tests.support import models
from tests.support.rpc_servers import process_on, rpc_server
from tests.worker.test_worker import SWIGLU, WIDTH

LAYERS, EXPERTS, CHOSEN = 4, 16, 4
HANG_SECONDS = 120
MODEL_CHAIN = KeyedChain.of(1, SWIGLU)


class Servers:
    """rpc-servers with all experts of a small model."""

    def __init__(self, engine: EngineLocation, stack: contextlib.ExitStack) -> None:
        self._engine = engine
        self._stack = stack
        self.model = models.qwen3moe()

    def address(self, name: str) -> ServerAddress:
        port = self._stack.enter_context(rpc_server(self._engine))
        (share,) = even_shares(self.model, 1)
        return ServerAddress(name, port, self._engine, str(self.model), tuple(share))

    def reference(self) -> ExpertCompute:
        """The same experts, asked in the plainest way."""
        rpc = RpcSocket("127.0.0.1", self.address("reference").port)
        self._stack.callback(rpc.close)
        with contextlib.closing(GgufSlabs(self.model)) as slabs:
            store = LoadedSlabs(rpc, slabs)
        return ExpertCompute(rpc, read_op_table(self._engine, rpc.version), store)

    def swarm(self, *addresses: ServerAddress) -> Swarm:
        swarm = Swarm(expert_counts(self.model), None, None, SwarmOptions())
        self._stack.callback(swarm.close)
        for address in addresses:
            swarm.holders.add(address)
        until(lambda: all(holder.state == LinkState.UP for holder in swarm.holders.all()))
        return swarm


@pytest.fixture
def servers(stock_engine: EngineLocation) -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        yield Servers(stock_engine, stack)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def returns(work: Callable[[], Any]) -> Any:
    """Return what ``work`` does, unless it hangs."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    assert found, "it hangs"
    return found[0]


def a_job(tokens: int, seed: int, chain: KeyedChain = MODEL_CHAIN) -> Job:
    numbers = np.random.default_rng(seed)
    ids = np.stack([numbers.choice(EXPERTS, CHOSEN, replace=False) for _ in range(tokens)])
    rows = numbers.standard_normal((tokens, WIDTH)).astype(np.float32)
    return Job(0, chain, ids.astype(np.int32), (rows,))


class Asker:
    """Asks a holder at random and compares every row with what the reference computed."""

    def __init__(self, holder: Holder, reference: ExpertCompute, seed: int) -> None:
        self._holder = holder
        self._reference = reference
        self._chance = np.random.default_rng(seed)
        self._wanted: dict[int, bytes] = {}
        self._number = 0
        self.answered = 0

    def ask(self, tokens: int) -> None:
        layer = int(self._chance.integers(LAYERS))
        job = a_job(tokens, int(self._chance.integers(6)))
        pairs = Pairs(
            layer,
            np.repeat(np.arange(tokens, dtype=np.int32), CHOSEN),
            job.ids.reshape(-1).copy(),
            job.inputs,
        )
        self._number += 1
        self._wanted[self._number] = bytes(self._reference.compute(MODEL_CHAIN, pairs))
        if tokens > 1:
            self._holder.ask(self._number, MODEL_CHAIN, pairs)
            return
        row: Buffer = job.inputs[0].data.cast("B")
        token = TokenPairs(layer, job.ids[0].tolist(), row)
        self._holder.ask_token(self._number, MODEL_CHAIN, token)

    def forget(self) -> None:
        """Want nothing of what was asked."""
        for number in self._wanted:
            self._holder.forget(number)
        self._wanted.clear()

    def gather(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._wanted and time.monotonic() < deadline:
            wait_for_links([self._holder], 20)
            self._holder.resume()
            self._holder.receive(float(self._chance.choice([0.0, 1.0, 250.0])))
            while (answer := self._holder.next_answer()) is not None:
                wanted = self._wanted.pop(answer.request_id, None)
                if wanted is not None:
                    assert bytes(answer.rows) == wanted
                    self.answered += 1

    def leave(self) -> None:
        """Close the link in the middle, and open it again."""
        self._wanted.clear()
        self._holder.close()


def test_rows_are_right_whatever_is_asked_forgotten_and_broken_off(servers: Servers) -> None:
    address = servers.address("s")
    process = process_on(address.port)
    holder = address.holder(0)
    holder.open((), None)
    seed = secrets.randbelow(1 << 30)
    print("seed", seed)
    chance = np.random.default_rng(seed)
    asker = Asker(holder, servers.reference(), seed)
    for tokens in (1, 7, 1, 300, 1, 900, 1):
        asker.ask(tokens)
        asker.gather(HANG_SECONDS)
    for _ in range(40):
        for _ in range(chance.integers(1, 4)):
            asker.ask(int(chance.choice([1, 1, 1, 2, 64, 600])))
        is_stopped = chance.random() < 0.2
        if is_stopped:
            process.suspend()
            # More than sockets hold, so that a part of it waits here.
            asker.ask(900)
        asker.gather(float(chance.choice([0.0, 0.02] if is_stopped else [0.0, 0.02, 20.0])))
        if chance.random() < 0.3:
            asker.forget()
        if is_stopped or chance.random() < 0.3:
            asker.leave()
            process.resume()
            holder.open((), None)
    asker.gather(HANG_SECONDS)
    asker.ask(1)
    asker.gather(HANG_SECONDS)
    assert asker.answered > 10
    holder.end()


def test_an_expert_that_is_not_held_is_refused_and_the_rest_goes_on(servers: Servers) -> None:
    holder = servers.address("s").holder(0)
    holder.open((), None)
    asker = Asker(holder, servers.reference(), 1)
    zeros = np.zeros(1, np.int32)
    with pytest.raises(FrameError, match="Layer 99"):
        holder.ask(1000, MODEL_CHAIN, Pairs(99, zeros, zeros, a_job(1, 0).inputs))
    asker.ask(1)
    asker.gather(HANG_SECONDS)
    assert asker.answered == 1
    holder.end()


@pytest.mark.parametrize("tokens", [1, 1500])
def test_a_server_that_falls_silent_after_it_made_room_is_late_like_any_other(
    servers: Servers, tokens: int
) -> None:
    addresses = [servers.address(name) for name in ("one", "two")]
    swarm = servers.swarm(*addresses)
    chain = swarm.learn(0, SWIGLU)
    # Scratch memory grows here; with 1500 tokens it would have to grow again.
    for seed in (1, 2):
        swarm.compute(a_job(200, seed, chain))
    before = {holder.name: holder.pair_count for holder in swarm.holders.all()}
    wanted = swarm.compute(a_job(1, 3, chain))
    most = max(swarm.holders.all(), key=lambda each: each.pair_count - before[each.name])
    silent = next(address for address in addresses if address.name == most.name)
    late_count = swarm.counters.late_count
    process = process_on(silent.port)
    process.suspend()
    try:
        found = returns(lambda: swarm.compute(a_job(tokens, 3, chain)))
    finally:
        process.resume()
    assert tokens > 1 or (found == wanted).all()
    assert swarm.counters.late_count > late_count
    until(lambda: all(holder.state == LinkState.UP for holder in swarm.holders.all()))
    assert (swarm.compute(a_job(tokens, 3, chain)) == found).all()


def test_a_server_that_is_removed_while_it_is_checked_holds_nobody_up(servers: Servers) -> None:
    silent, healthy = servers.address("silent"), servers.address("healthy")
    swarm = servers.swarm(silent, healthy)
    process = process_on(silent.port)
    process.suspend()
    try:
        chain = swarm.learn(0, SWIGLU)
        swarm.holders.remove("silent")
        found = returns(lambda: swarm.compute(a_job(1, 5, chain)))
    finally:
        process.resume()
    assert found.shape == (CHOSEN, WIDTH)
    until(lambda: [holder.name for holder in swarm.holders.all()] == ["healthy"])
