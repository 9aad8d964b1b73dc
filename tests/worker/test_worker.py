"""The worker process against the reference, hostile peers, and its end."""

import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from linkcpp.engine.records import EngineLocation
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.chain import Chain, ChainInput, ChainSource, ChainStep, SourceKind
from linkcpp.worker.frames import (
    HEADER_BYTES,
    Compute,
    ErrorCode,
    FrameError,
    FrameType,
    Header,
    Limits,
    Pairs,
    Welcome,
    pack_chain,
    pack_compute,
    pack_header,
    pack_hello,
    parse_error,
    parse_header,
    parse_rows,
    parse_welcome,
)
from linkcpp.worker.slabs import GgufSlabs
from tests.support.models import qwen3moe
from tests.support.swarm import TOKEN, Running, running_worker

SEGMENTS = [Segment(layer=0, first=0, last=3), Segment(layer=0, first=8, last=9)]
WIDTH = 512


def _weight(part: str) -> ChainSource:
    return ChainSource(kind=SourceKind.WEIGHT, weight=f"ffn_{part}_exps.weight")


def _steps() -> tuple[ChainStep, ...]:
    ids, row = ChainSource(kind=SourceKind.IDS), ChainSource(kind=SourceKind.INPUT)
    steps = [ChainSource(kind=SourceKind.STEP, index=number) for number in range(3)]
    return (
        ChainStep(op="MUL_MAT_ID", width=256, sources=(_weight("gate"), row, ids)),
        ChainStep(op="MUL_MAT_ID", width=256, sources=(_weight("up"), row, ids)),
        ChainStep(op="GLU", width=256, sources=(steps[0], steps[1]), function="SWIGLU"),
        ChainStep(op="MUL_MAT_ID", width=WIDTH, sources=(_weight("down"), steps[2], ids)),
    )


SWIGLU = Chain(inputs=(ChainInput(width=WIDTH, per_pair=False),), steps=_steps())


class Peer:
    """A client that can misbehave."""

    def __init__(self, worker: Running, token: str | None = TOKEN) -> None:
        self.socket = socket.create_connection(("127.0.0.1", worker.ports[0]), 120)
        if token is not None:
            self.socket.sendall(pack_hello(token))
            self.welcome: Welcome = parse_welcome(self.receive(FrameType.WELCOME)[1])

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def frame(self) -> tuple[Header, bytes]:
        header = parse_header(self._exactly(HEADER_BYTES), Limits())
        return header, self._exactly(header.payload_bytes)

    def receive(self, kind: FrameType) -> tuple[Header, bytes]:
        header, payload = self.frame()
        if header.kind == FrameType.ERROR:
            raise parse_error(payload)
        assert header.kind == kind
        return header, payload

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def teach(self, chain: Chain = SWIGLU, number: int = 1) -> None:
        self.socket.sendall(pack_chain(1, number, chain))
        self.receive(FrameType.CHAIN_READY)

    def compute(
        self, rows: "np.ndarray[tuple[int, int], np.dtype[np.float32]]", index: list[int],
        experts: list[int], layer: int = 0,
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":  # fmt: skip
        pairs = Pairs(layer, np.array(index, np.int32), np.array(experts, np.int32), (rows,))
        for part in pack_compute(3, Compute(1, pairs)):
            self.socket.sendall(part)
        header, payload = self.receive(FrameType.ROWS)
        assert header.request_id == 3
        return parse_rows(payload, (len(experts), WIDTH)).rows


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    from tests.support.engines import prebuilt_engine

    folder = tmp_path_factory.mktemp("worker")
    with running_worker(prebuilt_engine(), qwen3moe(), SEGMENTS, folder, name="w") as running:
        yield running


def _rows(count: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    random = np.random.default_rng(count)
    return random.standard_normal((count, WIDTH)).astype(np.float32)


def _reference(row: "np.ndarray[tuple[int], np.dtype[np.float32]]", expert: int) -> object:
    """SwiGLU in double precision on dequantized weights."""
    import gguf

    slabs = GgufSlabs(qwen3moe())
    weights = {}
    for tensor in slabs.tensors:
        if tensor.layer == 0:
            data = slabs.read(tensor, expert, 0, tensor.slab_bytes)
            raw = np.frombuffer(data, np.uint8).reshape(tensor.rows, -1)
            kind = gguf.GGMLQuantizationType(tensor.kind.number)
            weights[tensor.part] = gguf.dequantize(raw, kind).astype(np.float64)
    slabs.close()
    gate = weights["ffn_gate_exps.weight"] @ row
    hidden = gate / (1 + np.exp(-gate)) * (weights["ffn_up_exps.weight"] @ row)
    return weights["ffn_down_exps.weight"] @ hidden


@pytest.mark.slow
def test_a_worker_tells_what_it_holds(worker: Running) -> None:
    with Peer(worker) as peer:
        assert peer.welcome.segments == tuple(SEGMENTS)
        assert peer.welcome.hidden_size == WIDTH
        assert len(peer.welcome.model_digest) == 64


def test_rows_agree_with_the_function_computed_in_double_precision(worker: Running) -> None:
    rows = _rows(3)
    with Peer(worker) as peer:
        peer.teach()
        found = peer.compute(rows, [0, 1, 2, 0], [0, 3, 8, 9])
    for number, (row, expert) in enumerate(((0, 0), (1, 3), (2, 8), (0, 9))):
        wanted = np.asarray(_reference(rows[row], expert))
        cosine = found[number] @ wanted / np.linalg.norm(found[number]) / np.linalg.norm(wanted)
        assert cosine > 0.999


def test_the_layout_of_a_request_does_not_change_the_bits(worker: Running) -> None:
    rows = _rows(4)
    experts = [0, 1, 2, 3, 8, 9, 0, 1]
    index = [0, 0, 1, 1, 2, 2, 3, 3]
    with Peer(worker) as peer:
        peer.teach()
        together = peer.compute(rows, index, experts)
        spread = peer.compute(rows[index], list(range(8)), experts)
        alone = [peer.compute(rows[index[k]][None], [0], [experts[k]])[0] for k in range(8)]
    assert (together == spread).all()
    assert (together == np.array(alone)).all()


def test_a_pair_that_comes_twice_is_answered_twice_and_nan_stays_in_its_row(
    worker: Running,
) -> None:
    rows = _rows(2)
    with Peer(worker) as peer:
        peer.teach()
        before = peer.compute(rows, [0, 0, 1], [2, 2, 2])
        rows[1] = np.nan
        after = peer.compute(rows, [0, 0, 1], [2, 2, 2])
    assert (before[0] == before[1]).all()
    assert (after[:2] == before[:2]).all()
    assert not (after[2] == before[2]).any()


@pytest.mark.parametrize(
    ("layer", "experts", "code"),
    [
        (0, [4], ErrorCode.UNKNOWN_EXPERT),
        (0, [-1], ErrorCode.UNKNOWN_EXPERT),
        (0, [99], ErrorCode.UNKNOWN_EXPERT),
        (1, [0], ErrorCode.UNKNOWN_LAYER),
        (77, [0], ErrorCode.UNKNOWN_LAYER),
    ],
)
def test_what_is_not_held_is_refused_by_code_and_the_link_lives_on(
    worker: Running, layer: int, experts: list[int], code: ErrorCode
) -> None:
    with Peer(worker) as peer:
        peer.teach()
        with pytest.raises(FrameError) as caught:
            peer.compute(_rows(1), [0], experts, layer)
        assert caught.value.code == code
        assert np.isfinite(peer.compute(_rows(1), [0], [0])).all()


def test_a_chain_that_was_not_sent_or_does_not_fit_is_refused(worker: Running) -> None:
    odd = SWIGLU.model_copy(update={"inputs": (ChainInput(width=64, per_pair=False),)})
    with Peer(worker) as peer:
        with pytest.raises(FrameError) as caught:
            peer.compute(_rows(1), [0], [0])
        assert caught.value.code == ErrorCode.UNKNOWN_CHAIN
        peer.teach(odd)
        with pytest.raises(FrameError) as caught:
            peer.compute(_rows(1)[:, :64], [0], [0])
        assert caught.value.code == ErrorCode.BAD_CHAIN
        with pytest.raises(FrameError) as caught:
            peer.compute(_rows(1), [0], [0])
        assert caught.value.code == ErrorCode.WRONG_WIDTH


def test_without_the_token_nothing_is_answered_but_the_refusal(worker: Running) -> None:
    for opening in (
        pack_hello("wrong"),
        pack_header(FrameType.PING, 0, 0),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<4sBBHII", b"LCFR", 1, 1, 0, 0, 1 << 31),
    ):
        with Peer(worker, token=None) as peer:
            peer.socket.sendall(opening)
            header, _ = peer.frame()
            assert header.kind == FrameType.ERROR
            with pytest.raises((EOFError, ConnectionError)):
                peer.frame()


def test_random_and_mutated_frames_leave_the_worker_whole(worker: Running) -> None:
    random = np.random.default_rng(5)
    pairs = Pairs(0, np.zeros(1, np.int32), np.zeros(1, np.int32), (_rows(1),))
    good = b"".join(bytes(part) for part in pack_compute(3, Compute(1, pairs)))
    with Peer(worker) as steady:
        steady.teach()
        before = steady.compute(_rows(2), [0, 1], [0, 9])
        used = psutil.Process(worker.process.pid).memory_info().rss
        for _ in range(150):
            with Peer(worker) as peer:
                peer.teach()
                data = bytearray(good if random.random() < 0.8 else random.bytes(200))
                for _ in range(int(random.integers(1, 6))):
                    data[int(random.integers(0, min(len(data), 60)))] = int(random.integers(256))
                peer.socket.sendall(data[: int(random.integers(1, len(data) + 1))])
        assert (steady.compute(_rows(2), [0, 1], [0, 9]) == before).all()
        assert psutil.Process(worker.process.pid).memory_info().rss < used + 32 * 2**20


def test_sigterm_ends_worker_and_rpc_server(stock_engine: EngineLocation, tmp_path: Path) -> None:
    with running_worker(stock_engine, qwen3moe(), SEGMENTS, tmp_path, name="w") as running:
        family = psutil.Process(running.process.pid).children(recursive=True)
        assert any("rpc-server" in child.name() for child in family)
        with Peer(running):
            running.process.terminate()
            assert running.process.wait(120) == 0
        _, alive = psutil.wait_procs(family, 120)
        assert not alive


def test_a_worker_whose_rpc_server_dies_says_so_and_ends(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    with running_worker(stock_engine, qwen3moe(), SEGMENTS, tmp_path, name="w") as running:
        family = psutil.Process(running.process.pid).children(recursive=True)
        with Peer(running) as peer:
            peer.teach()
            next(child for child in family if child.name() == "ggml-rpc-server").kill()
            with pytest.raises((FrameError, EOFError, ConnectionError)):
                for _ in range(100):
                    peer.compute(_rows(1), [0], [0])
                    time.sleep(0.02)
        assert running.process.wait(120) == 2
        assert "rpc-server" in running.log.read_text()


def test_segments_that_the_model_does_not_have_are_refused_by_name() -> None:
    from linkcpp.common.errors import LinkcppError

    for segments, text in (
        ([Segment(layer=9, first=0, last=0)], "Layer 9 has no experts"),
        ([Segment(layer=0, first=3, last=16)], "experts 0-15, not 3-16"),
        ([], "No experts"),
    ):
        with pytest.raises(LinkcppError, match=text):
            GgufSlabs(qwen3moe(), segments)
