"""``linkcpp verify`` on deployments of real programs: exact, equivalent, lying, hollow."""

import asyncio
import json
import stat
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.common.resources import resource_folder
from linkcpp.dispatch.control import NewWorker
from linkcpp.model.slices.writing import write_backbone
from linkcpp.verify.generation import TextServer
from linkcpp.verify.prompts import load_prompts
from linkcpp.verify.silence import SilentError
from tests.dispatch.test_admission import Meddler, twice
from tests.dispatch.test_exactness import even_shares
from tests.launch.expert_plans import experts_plan
from tests.launch.swarm import Swarm, wait_until
from tests.support import models
from tests.support.engines import prebuilt_engine, source_engine
from tests.support.swarm import running_worker, worker_entry

pytestmark = pytest.mark.slow

FEW = ("--tokens", "6", "--prompts")


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path_factory.mktemp("verify"), prebuilt_engine())
    # One thread each: on a machine that others use as well, several wait for each other.
    swarm.has_own_cores = True
    templates = swarm.folder / "templates"
    templates.mkdir()
    shipped = (resource_folder("templates") / "llama-server.args.j2").read_text()
    (templates / "llama-server.args.j2").write_text(f"{shipped.rstrip()}\n--threads\n1\n")
    swarm.environment["LINKCPP_TEMPLATES"] = str(templates)
    swarm.start_agents("attic", "cellar")
    yield swarm
    swarm.close()


@pytest.fixture(scope="module")
def few_prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "few.txt"
    path.write_text("the of and to\n\nit is not the one that we were on when you have been there\n")
    return str(path)


@pytest.fixture
def stopped(swarm: Swarm) -> Iterator[None]:
    yield
    swarm.run("stop", "--all")
    wait_until(swarm.is_idle)


def verified(swarm: Swarm, *words: str, code: int = 0) -> Any:
    done = swarm.run("verify", *words, "--json", code=code)
    assert json.loads(done.stdout) == done.json
    return done.json


def test_layers_on_nodes_are_exact(swarm: Swarm, few_prompts: str, stopped: None) -> None:
    plan = swarm.plan(models.llama())
    swarm.launch(plan, "spread")
    found = verified(swarm, str(plan), *FEW, few_prompts)
    assert (found["verdict"], found["summary"]) == ("exact", "exact: difference 0")
    assert found["text"]["position_count"] == found["text"]["equal_count"] == 12
    assert found["text"]["largest_difference"] == found["text"]["mean_divergence"] == 0
    assert found["workers"] == []
    table = swarm.run("verify", "spread", *FEW, few_prompts)
    assert "exact: difference 0" in table.stdout
    lines = table.stderr.splitlines()
    assert lines[0].startswith("verifying spread: 2 prompts with 6 tokens after each")
    assert "comparing prompts: 0 of 2" in lines
    assert lines[-1] == "comparing prompts: 2 of 2"


def test_repacked_weights_are_equivalent(swarm: Swarm, few_prompts: str, stopped: None) -> None:
    plan = swarm.plan(models.qwen3moe(), "--repack", mode="single")
    swarm.launch(plan, "packed")
    found = verified(swarm, "packed", "--tokens", "24", "--prompts", few_prompts)
    assert found["verdict"] == "equivalent"
    assert found["summary"].startswith("equivalent within")
    assert 0 < found["text"]["largest_difference"] < 0.1


def test_experts_on_nodes_are_exact_and_a_worker_that_lies_is_named(
    swarm: Swarm, few_prompts: str, stopped: None
) -> None:
    model = models.qwen3moe()
    plan = experts_plan(swarm, model, {"attic": [(0, 9)], "cellar": [(6, 15)]})
    swarm.launch(plan, "mix")
    found = verified(swarm, str(plan), *FEW, few_prompts)
    assert found["verdict"] == "exact"
    assert [worker["against"] for worker in found["workers"]] == [["the model"]] * 2
    assert all(worker["agreement"]["row_count"] == 4 * 4 * 2 for worker in found["workers"])
    assert swarm.run("verify", "mix", *FEW, few_prompts).stdout.count("exact") >= 4

    control = next(swarm.home.rglob("dispatch-control.json"))
    assert stat.S_IMODE(control.stat().st_mode) == 0o600
    access = json.loads(control.read_text())
    folder = swarm.folder / "liar"
    folder.mkdir()
    share = even_shares(model, 1)[0]
    with running_worker(prebuilt_engine(), model, share, folder, name="honest") as honest:
        liar = Meddler("liar", honest, twice)
        _add_worker(access, liar.entry)
        found = verified(swarm, "mix", *FEW, few_prompts, code=1)
        assert found["verdict"] == "differs"
        assert found["summary"] == "differs: the rows of liar"
        # It was never used, so the text is what it was.
        assert found["text"]["verdict"] == "exact"
        liar.close()


def test_a_worker_of_another_build_is_admitted_and_told_to_be_equivalent_at_least(
    swarm: Swarm, few_prompts: str, stopped: None
) -> None:
    other_build = source_engine()
    model = models.qwen3moe()
    plan = experts_plan(swarm, model, {"attic": [(0, 15)]})
    swarm.launch(plan, "builds")
    access = json.loads(next(swarm.home.rglob("dispatch-control.json")).read_text())
    folder = swarm.folder / "other-build"
    folder.mkdir()
    share = even_shares(model, 1)[0]
    with running_worker(other_build, model, share, folder, name="other") as other:
        _add_worker(access, worker_entry("other", other))
        found = verified(swarm, "builds", *FEW, few_prompts)
        workers = {worker["name"]: worker for worker in found["workers"]}
        assert workers.keys() > {"other"}
        assert workers.pop("other")["verdict"] in ("exact", "equivalent")
        assert {worker["verdict"] for worker in workers.values()} == {"exact"}
        assert found["verdict"] in ("exact", "equivalent")
        assert found["summary"].startswith(("exact: difference 0", "equivalent within"))


def test_a_deployment_of_several_sequences_is_verified_one_sequence_at_a_time(
    swarm: Swarm, few_prompts: str, stopped: None
) -> None:
    layout = {"attic": [(0, 7)], "cellar": [(8, 15)]}
    plan = experts_plan(swarm, models.qwen3moe(), layout, parallel=3)
    swarm.launch(plan, "several")
    found = verified(swarm, "several", *FEW, few_prompts)
    assert (found["verdict"], found["summary"]) == ("exact", "exact: difference 0")
    assert found["text"]["position_count"] == found["text"]["equal_count"] == 12


def _add_worker(access: dict[str, Any], entry: NewWorker) -> None:
    answer = httpx.post(
        f"http://127.0.0.1:{access['port']}/workers",
        json=entry.model_dump(),
        headers={"Authorization": f"Bearer {access['token']}"},
        timeout=60,
    )
    assert answer.status_code == 200


def test_a_hollow_coordinator_compares_workers_with_each_other(
    swarm: Swarm, few_prompts: str, stopped: None
) -> None:
    model = models.qwen3moe()
    plan = experts_plan(swarm, model, {"attic": [(0, 15)], "cellar": [(0, 15)]})
    swarm.launch(plan, "first")
    swarm.run("stop", "first")
    hollow = hollow_copy(model, swarm.folder / "hollow.gguf")
    swarm.launch(plan, "hollow", "--model", str(hollow))
    found = verified(swarm, "hollow", *FEW, few_prompts)
    assert found["verdict"] == "exact"
    assert found["text"] is None
    assert found["summary"] == "workers agree: difference 0; the text was not compared"
    assert "no whole model" in found["notes"][0]
    others = {tuple(worker["against"]) for worker in found["workers"]}
    assert all(against[0].startswith("worker ") for against in others)
    # With the whole model at hand after all, the text is compared as well.
    found = verified(swarm, "hollow", *FEW, few_prompts, "--model", str(model))
    assert found["text"]["verdict"] == "exact"


def hollow_copy(model: Path, path: Path) -> Path:
    from linkcpp.model.slices.writing import open_whole_model

    with open_whole_model(model) as files:
        write_backbone(files, path, lambda _: None)
    return path


def test_what_cannot_be_verified_is_refused_in_one_sentence(
    swarm: Swarm, tmp_path: Path, stopped: None
) -> None:
    plan = swarm.plan(models.llama(), mode="single")
    assert "No live deployment" in swarm.run("verify", str(plan), code=2).stderr
    assert "no deployment" in swarm.run("verify", "nothing", code=2).stderr
    swarm.launch(plan, "alone")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    assert "has no prompt" in swarm.run("verify", "alone", "--prompts", str(empty), code=2).stderr
    broken = tmp_path / "broken.json"
    broken.write_text('{"prompts": 1}')
    assert "no list" in " ".join(
        swarm.run("verify", "alone", "--prompts", str(broken), code=2).stderr.split()
    ).replace("not a list", "no list")
    assert "do not fit" in swarm.run("verify", "alone", "--tokens", "5000", code=2).stderr
    other = str(models.qwen3moe())
    assert "another model" in swarm.run("verify", "alone", "--model", other, code=2).stderr
    refused = swarm.run("verify", "alone", "--model", "a-hubs-name", code=2).stderr
    assert "Name its GGUF file" in " ".join(refused.split())
    swarm.run("stop", "alone")
    assert "does not run" in swarm.run("verify", "alone", code=2).stderr


def test_the_prompts_that_ship_are_many_and_of_any_length() -> None:
    prompts = load_prompts()
    assert len(prompts) >= 10
    assert min(map(len, prompts)) < 10
    assert max(map(len, prompts)) > 1500
    assert any(ord(max(prompt)) > 0x4E00 for prompt in prompts)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]
Ask = Callable[[TextServer], Coroutine[Any, Any, Any]]


def _ask_stand_in(handler: Handler, who: str, ask: Ask) -> Any:
    """Ask a stand-in for llama-server, for what a real one does too seldom."""

    async def run() -> Any:
        server = await asyncio.start_server(handler, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        async with server, TextServer(f"http://127.0.0.1:{port}", who) as text:
            return await ask(text)

    return asyncio.run(run())


async def _answer(writer: asyncio.StreamWriter, status: str, told: Any) -> None:
    body = json.dumps(told).encode()
    head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    writer.close()


def test_a_server_that_goes_away_in_the_middle_is_told_of_in_words() -> None:
    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    with pytest.raises(SilentError) as told:
        _ask_stand_in(hang_up, "The deployment", lambda text: text.tokenize("the"))
    assert str(told.value) == ("The deployment stopped answering: it closed the connection.")


def test_tokens_that_end_within_a_character_are_asked_for_again_with_more_behind_them() -> None:
    """llama-server tells nothing of such tokens until the character ends."""
    asked: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size_bytes = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        count = json.loads(await reader.readexactly(size_bytes))["n_predict"]
        asked.append(count)
        steps = [{"id": 7, "top_logprobs": [{"id": 7, "logprob": -0.5}]}] * count
        told = {"completion_probabilities": steps} if count > 6 else {"content": ""}
        await _answer(writer, "200 OK", told)

    found = _ask_stand_in(answer, "The whole model", lambda text: text.continue_text([1, 2], 6))
    assert len(found) == 6
    assert asked == [6, 10]


def test_a_server_that_refuses_is_told_of_in_its_own_words() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        told = {"error": {"code": 400, "message": "the prompt is too long"}}
        await _answer(writer, "400 Bad Request", told)

    with pytest.raises(LinkcppError) as told:
        _ask_stand_in(refuse, "The deployment", lambda text: text.tokenize("the"))
    assert told.value.message == "The deployment refuses: the prompt is too long"
