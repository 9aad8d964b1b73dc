"""Workers that begin to lie once they are used: found by comparing some of their rows."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linkcpp.dispatch.checks import is_difference, who_is_wrong
from linkcpp.dispatch.control import NewWorker
from linkcpp.dispatch.failures import FailureCounter
from linkcpp.engine.records import EngineLocation
from linkcpp.worker.agreement import Verdict
from tests.dispatch.test_admission import Cluster, check, workers_of
from tests.dispatch.test_exactness import LONG, SHORT, even_shares
from tests.support.swarm import (
    Device,
    Server,
    as_json,
    ask_until,
    own_server,
    running_llama_server,
    worker_entry,
)

# So much that a short answer has many; what users have is less.
RATE = 0.2


class Lying(Cluster):
    """A cluster with one worker whose rows are multiplied by ``factor``."""

    def __init__(self, engine: EngineLocation, folder: Path, stack: contextlib.ExitStack) -> None:
        super().__init__(engine, folder, stack)
        self.factor = np.ones(1, np.float32)
        self.counter_file = folder / "failures"

    def liar(self) -> NewWorker:
        return self.meddler("liar", lambda rows: rows * self.factor)

    def honest(self, *names: str) -> list[NewWorker]:
        return [worker_entry(name, self.worker(name)) for name in names]

    def serve(
        self, entries: list[NewWorker], *, full: bool, **options: Any
    ) -> tuple[Device, Server]:
        options = {"spot_check_rate": RATE, "failure_counter": self.counter_file, **options}
        device = self.device(entries, full=full, **options)
        server = self.stack.enter_context(
            running_llama_server(self.engine, self.model, self.folder, device_port=device.port)
        )
        return device, server

    @property
    def failure_count(self) -> int:
        """What the front looks at to mark answers as failed."""
        return FailureCounter(self.counter_file).value


def asked(device: Device, server: Server, what: str) -> dict[str, Any]:
    """Ask until something holds: which pieces are compared is drawn, and how many are, too."""
    return ask_until(device, server, what, prompt=SHORT, count=24)


@pytest.fixture
def lying(stock_engine: EngineLocation, tmp_path: Path) -> Iterator[Lying]:
    with contextlib.ExitStack() as stack:
        yield Lying(stock_engine, tmp_path, stack)


def test_rows_that_turn_negative_are_found_with_the_fallback_and_not_used(lying: Lying) -> None:
    device, server = lying.serve([lying.liar()], full=True)
    wanted = as_json(server.complete(SHORT, 24))
    assert asked(device, server, "s['spot_check_count'] > 0")["differences"] == []
    lying.factor[0] = -1
    assert as_json(server.complete(SHORT, 24)) != wanted
    status = asked(device, server, "s['workers'][0]['state'] == 'refused'")
    assert "are not those of the model (cosine -1.000000)" in status["workers"][0]["detail"]
    (sentence,) = device.wait_until("s['differences']")["differences"]
    assert sentence.startswith("Worker liar is no longer used: its rows for expert ")
    assert status["failures"][-1]["are_in_doubt"]
    assert status["failed_call_count"] == 0
    assert lying.failure_count >= 1
    # The fallback computes from now on, though the worker is as good as any at its admission.
    assert as_json(server.complete(SHORT, 24)) == wanted


def test_with_three_holders_the_odd_one_is_not_used_any_more(lying: Lying) -> None:
    device, server = lying.serve([lying.liar(), *lying.honest("a", "b")], full=False)
    wanted = as_json(server.complete(SHORT, 24))
    lying.factor[0] = -1
    asked(device, server, "s['workers'][0]['state'] == 'refused'")
    assert as_json(server.complete(SHORT, 24)) == wanted
    status = device.status()
    assert [worker["state"] for worker in status["workers"]] == ["refused", "up", "up"]
    assert "are not those of " in status["workers"][0]["detail"]
    assert lying.failure_count >= 1


def test_with_two_holders_that_differ_nobody_knows_and_answers_fail(lying: Lying) -> None:
    device, server = lying.serve([lying.liar(), *lying.honest("a")], full=False)
    assert asked(device, server, "s['spot_check_count'] > 0")["difference_count"] == 0
    lying.factor[0] = -1
    status = asked(device, server, "s['differences']")
    (sentence,) = status["differences"]
    assert sentence.startswith("Workers a and liar have different rows for expert ")
    assert "nobody can tell without the whole model here or a third worker" in sentence
    assert [worker["state"] for worker in status["workers"]] == ["up", "up"]
    assert status["failures"][-1]["are_in_doubt"]
    before = lying.failure_count
    assert before >= 1
    # As long as it goes on, every answer fails.
    asked(device, server, f"s['difference_count'] > {status['difference_count']}")
    assert lying.failure_count > before


def test_rows_that_are_a_little_off_are_found_where_they_were_exact_before(lying: Lying) -> None:
    device, server = lying.serve([lying.liar()], full=True, spot_check_rate=1.0)
    assert asked(device, server, "s['spot_check_count'] > 40")["difference_count"] == 0
    # No check of another backend would see this.
    lying.factor[0] = 1.001
    status = asked(device, server, "s['workers'][0]['state'] == 'refused'")
    assert "are not those of the model (cosine 1.000000)" in status["workers"][0]["detail"]


def test_a_worker_that_was_always_a_little_off_is_taken_for_another_backend(lying: Lying) -> None:
    lying.factor[0] = 1.001
    device, server = lying.serve([lying.liar()], full=True, spot_check_rate=1.0)
    status = asked(device, server, "s['spot_check_count'] > 40")
    assert status["difference_count"] == lying.failure_count == 0
    assert status["workers"][0]["state"] == "up"


def test_honest_holders_never_differ(engine: EngineLocation, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        lying = Lying(engine, tmp_path, stack)
        (share,) = even_shares(lying.model, 1)
        own = stack.enter_context(own_server(engine, lying.model, share, name="own"))
        device, server = lying.serve(
            lying.honest("a", "b"), full=True, servers=(own,), spot_check_rate=1.0
        )
        with running_llama_server(engine, lying.model, tmp_path, label="alone") as alone:
            for prompt, count in ((SHORT, 24), (LONG, 4)):
                assert as_json(server.complete(prompt, count)) == as_json(
                    alone.complete(prompt, count)
                )
        status = asked(device, server, "s['spot_check_count'] > 100")
        assert status["difference_count"] == lying.failure_count == 0
        assert status["fallback"]["pair_count"] == status["rerouted_pair_count"] == 0
        assert [worker["state"] for worker in status["workers"]] == ["up"] * 3


def test_a_check_that_finds_wrong_rows_marks_answers_under_way_as_failed(lying: Lying) -> None:
    device, server = lying.serve([lying.liar()], full=True, spot_check_rate=0.0)
    server.complete(SHORT, 4)
    lying.factor[0] = 2
    assert check(device, "liar").json()["complaint"]
    assert workers_of(device)["liar"]["state"] == "refused"
    assert lying.failure_count == 1
    assert device.status()["spot_check_count"] == 0


def test_only_bits_that_were_equal_before_have_to_be_equal() -> None:
    assert is_difference(Verdict.DIFFERS, were_equal=False)
    assert is_difference(Verdict.EQUIVALENT, were_equal=True)
    assert not is_difference(Verdict.EQUIVALENT, were_equal=False)
    assert not is_difference(Verdict.EXACT, were_equal=True)


@pytest.mark.parametrize(
    ("first", "second", "is_certain", "wrong"),
    [
        (Verdict.DIFFERS, Verdict.EXACT, False, (True, False)),
        (Verdict.EXACT, Verdict.DIFFERS, True, (False, True)),
        (Verdict.EQUIVALENT, Verdict.EXACT, False, (True, False)),
        (Verdict.DIFFERS, Verdict.DIFFERS, True, (True, True)),
        (Verdict.DIFFERS, Verdict.DIFFERS, False, (False, False)),
        (Verdict.EQUIVALENT, Verdict.EQUIVALENT, True, (False, False)),
    ],
)
def test_who_is_farther_from_a_third_is_wrong(
    first: Verdict, second: Verdict, is_certain: bool, wrong: tuple[bool, bool]
) -> None:
    assert who_is_wrong(first, second, is_certain=is_certain) == wrong
