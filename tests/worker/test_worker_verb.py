"""``linkcpp worker`` as a person meets it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from linkcpp.engine.records import EngineLocation
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.frames import FrameError
from tests.model.test_slices import cut
from tests.support.models import llama, qwen3moe
from tests.support.swarm import Running
from tests.worker.test_worker import WIDTH, Peer


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "linkcpp.cli.main", "worker", *words]


@contextmanager
def running_verb(engine: EngineLocation, log: Path, *words: str) -> Iterator[Running]:
    assert engine.rpc_server is not None
    environment = {**os.environ, "LINKCPP_ENGINE": str(engine.rpc_server.parent), "COLUMNS": "200"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command(*words), env=environment, stdout=output, stderr=output, text=True
        )
    try:
        while not (match := re.search(r"ready on 127\.0\.0\.1:(\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield Running(process, (int(match[1]),), log)
    finally:
        process.kill()
        process.wait()


def test_slices_are_served_by_hand_until_ctrl_c(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    files = [cut(qwen3moe(), tmp_path / f"{text[0]}.gguf", text) for text in ("0:0-3", "1:2-5")]
    token = tmp_path / "token"
    words = [word for file in files for word in ("--slice", str(file.path))]
    log = tmp_path / "log.txt"
    with running_verb(
        stock_engine, log, *words, "--token-file", str(token), "--threads", "1"
    ) as worker:
        assert token.stat().st_mode & 0o777 == 0o600
        assert token.read_text().strip() not in log.read_text()
        assert "layers 0, experts 0-3" in log.read_text()
        with pytest.raises(FrameError, match="token"):
            Peer(worker, "wrong")
        with Peer(worker, token.read_text().strip()) as peer:
            assert peer.welcome.segments == (
                Segment(layer=0, first=0, last=3),
                Segment(layer=1, first=2, last=5),
            )
            peer.teach()
            rows = np.ones((1, WIDTH), np.float32)
            assert peer.compute(rows, [0], [5], layer=1).shape == (1, WIDTH)
        children = psutil.Process(worker.process.pid).children(recursive=True)
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(120) in (0, 130)
        psutil.wait_procs(children, timeout=120)
        assert not any(child.is_running() for child in children)


def test_experts_of_a_whole_model_are_served_by_hand(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    words = ("--model", str(qwen3moe()), "--segment", "0-1:0-1", "--threads", "1")
    with running_verb(stock_engine, tmp_path / "log.txt", *words) as worker:
        path = Path(os.environ["LINKCPP_HOME"], "state", "workers", "token")
        with Peer(worker, path.read_text().strip()) as peer:
            assert len(peer.welcome.segments) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "either slices or a model"),
        (("--slice", "a.gguf", "--model", "b.gguf"), "either slices or a model"),
        (("--slice", "a.gguf", "--segment", "0:0"), "served whole"),
        (("--slice", "no-such-file.gguf"), "no-such-file.gguf"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_sentence(
    stock_engine: EngineLocation, words: tuple[str, ...], told: str
) -> None:
    assert stock_engine.rpc_server is not None
    environment = {**os.environ, "LINKCPP_ENGINE": str(stock_engine.rpc_server.parent)}
    done = subprocess.run(
        command(*words), env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dense_model_has_nothing_to_serve(stock_engine: EngineLocation) -> None:
    assert stock_engine.rpc_server is not None
    environment = {**os.environ, "LINKCPP_ENGINE": str(stock_engine.rpc_server.parent)}
    done = subprocess.run(
        command("--model", str(llama())),
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no experts" in done.stderr
