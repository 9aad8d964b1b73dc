"""A model that lies at a hub only, as a coordinator uses it: plan, backbone, slices, delivery."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from linkcpp.cli.plan import app as plan_verb
from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import cache_folder, data_folder, state_folder
from linkcpp.engine.records import EngineLocation
from linkcpp.launch.experts.delivery import Delivery
from linkcpp.launch.experts.events import SliceSeen
from linkcpp.launch.experts.files import Backbone, ExpertFiles
from linkcpp.launch.finding import FoundNode
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.records import LaunchRequest
from linkcpp.launch.start import make_request
from linkcpp.launch.surroundings import Surroundings
from linkcpp.model.inventory import read_inventory
from linkcpp.model.parts import open_model
from linkcpp.model.slices.writing import write_backbone
from linkcpp.node.records import SliceState
from linkcpp.planning.records import ExpertShare, Plan, PlanMode
from linkcpp.registry.client import HubClient, joined_client
from linkcpp.registry.hub_location import HubLocation, hub_node_url
from linkcpp.registry.model_lookup import hub_access, load_model_anywhere
from tests.launch.expert_plans import memory
from tests.launch.hub_process import HubProcess, hub_process
from tests.model.test_slices import flip
from tests.node.agents import RunningAgent, running_agent
from tests.node.slices import cut_here, segments
from tests.support.models import qwen3moe

pytestmark = pytest.mark.slow

CHOSEN = ((0, 0, 3), (2, 4, 9))
NAME = "122B"  # also the name of a preset


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with hub_process(tmp_path_factory.mktemp("hub")) as running:
        running.add(qwen3moe(), NAME)
        yield running


@pytest.fixture
def location(hub: HubProcess) -> str:
    """Where the model is, for this machine, which joined."""
    hub.join()
    return HubLocation(hub.url, NAME).text


@pytest.fixture
async def node(stock_engine: EngineLocation) -> AsyncIterator[RunningAgent]:
    async with running_agent(stock_engine) as running:
        yield running


async def files_of(location: str, planned: str | None = None) -> ExpertFiles:
    return await asyncio.to_thread(ExpertFiles, location, planned or location)


def planned(*words: str) -> Plan:
    result = CliRunner().invoke(plan_verb, ["--no-mdns", "--json", *words])
    assert result.exit_code == 0, result.output
    return Plan.model_validate_json(result.stdout)


def request_for(plan: Plan, model: str | None = None) -> LaunchRequest:
    return make_request(
        plan,
        model=model,
        name="mix",
        host="127.0.0.1",
        port=0,
        api_key_file=None,
        templates=None,
        node_urls=(),
        use_mdns=False,
    )


def test_a_plan_of_a_hubs_model_needs_its_header_only(hub: HubProcess, location: str) -> None:
    plan = planned("--hub", hub.url, "--model", NAME)
    # The user said where to look, so the preset of that name is not meant.
    assert plan.model.source == location
    assert plan.model.digest == read_inventory(qwen3moe()).digest
    # With no file here, spreading the experts is all that can be launched.
    assert plan.mode is PlanMode.EXPERTS
    assert request_for(plan).model_path == location
    kept = sum(path.stat().st_size for path in cache_folder().rglob("*") if path.is_file())
    assert kept < qwen3moe().stat().st_size // 20
    # The location alone is enough, also for finding nodes: there is no cluster token here.
    assert planned("--model", location).model == plan.model


def test_a_file_and_a_preset_are_what_they_were(hub: HubProcess, location: str) -> None:
    assert load_model_anywhere(str(qwen3moe()), [hub.url]).source == str(qwen3moe())
    assert load_model_anywhere("122b", [hub.url]).source == location
    assert load_model_anywhere("235B", [hub.url]).source.startswith("preset ")
    with pytest.raises(LinkcppError, match="No hub that was named has it") as raised:
        load_model_anywhere("nonsense", [hub.url])
    assert f"have {NAME}" in (raised.value.hint or "")


def test_a_plan_of_another_mode_needs_the_file(location: str) -> None:
    plan = planned("--mode", "single", "--model", location)
    with pytest.raises(LinkcppError, match="needs its file on this machine") as raised:
        request_for(plan)
    assert location in raised.value.message
    assert "--mode experts" in (raised.value.hint or "")
    assert request_for(plan, str(qwen3moe())).model_path == str(qwen3moe())


async def test_the_backbone_comes_from_the_hub_goes_on_and_is_kept(
    location: str, tmp_path: Path
) -> None:
    with open_model(qwen3moe()) as model:
        (written,) = write_backbone(model, tmp_path / "here.gguf", lambda _: None)
    began = asyncio.Event()
    making = asyncio.create_task((await files_of(location)).backbone(lambda *_: began.set()))
    await began.wait()
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)

    seen: list[tuple[Backbone, int]] = []
    made = await (await files_of(location)).backbone(lambda *news: seen.append(news))
    await asyncio.sleep(0)
    assert made.path.read_bytes() == written.path.read_bytes()
    assert seen[-1] == (made, written.copied_bytes)
    changed = made.path.stat().st_mtime_ns
    assert await (await files_of(location)).backbone(lambda *_: None) == made
    assert made.path.stat().st_mtime_ns == changed


async def test_a_backbone_is_started_again_while_the_hub_is_away(
    location: str, tmp_path: Path, hub: HubProcess
) -> None:
    plan = await asyncio.to_thread(planned, "--model", location)
    folder = DeploymentFolder(tmp_path / "mix")
    async with contextlib.aclosing(Surroundings(folder, request_for(plan))) as surroundings:
        await surroundings.check_model(plan)
        made = await (await surroundings.expert_files()).backbone(lambda *_: None)
        hub.kill()
        try:
            await surroundings.check_model(plan)
            assert await (await surroundings.expert_files()).backbone(lambda *_: None) == made
        finally:
            hub.start()


def test_a_token_that_cannot_be_renewed_does_until_the_hub_is_back(
    hub: HubProcess, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_access(hub.url) as access:
        first = access.token()
        monkeypatch.setattr("linkcpp.registry.connection.monotonic", lambda: time.monotonic() + 1e6)
        hub.kill()
        try:
            with ThreadPoolExecutor(2) as threads:
                assert list(threads.map(lambda _: access.token(), range(4))) == [first] * 4
            with hub_access(hub.url) as another, pytest.raises(LinkcppError, match="be reached"):
                another.token()
        finally:
            hub.start()
        assert access.token() != first


async def test_experts_of_the_coordinator_come_as_a_slice(location: str, tmp_path: Path) -> None:
    files = await files_of(location)
    path = await files.kept_slice(segments(*CHOSEN), lambda _: None)
    assert path.read_bytes() == cut_here(tmp_path, *CHOSEN).path.read_bytes()


class Deliverer:
    """Delivers one share to the agent, through the hub or as a neighbour."""

    def __init__(self, node: RunningAgent, hub_url: str | None) -> None:
        self._node = node
        self._hub_url = hub_url
        self.seen: list[SliceSeen] = []

    async def run(self, files: ExpertFiles) -> Any:
        record = await self._node.client.node()
        far = self._hub_url and hub_node_url(self._hub_url, record.node_id)
        found = FoundNode(self._node.client, record, far or self._node.url, 1.0)
        share = ExpertShare(
            node_id=record.node_id,
            node_name="attic",
            is_coordinator=False,
            device="CPU",
            segments=segments(*CHOSEN),
            memory=memory(0),
        )
        delivery = Delivery(0, share, found, files, self.seen.append)  # type: ignore[arg-type]
        return await self._node.client.slice(await delivery.run())


@pytest.fixture
async def joined(node: RunningAgent, location: str, hub: HubProcess) -> AsyncIterator[HubClient]:
    """The agent's place at the hub; one machine stands for both ends here."""
    async with joined_client(hub.url) as client:
        node.agent.slices.hub = client
        yield client


@pytest.mark.parametrize("has_file", [False, True])
async def test_a_node_behind_the_hub_fetches_from_there(
    has_file: bool, node: RunningAgent, joined: HubClient, location: str, tmp_path: Path
) -> None:
    here = cut_here(tmp_path, *CHOSEN)
    files = await files_of(str(qwen3moe()) if has_file else location)
    deliverer = Deliverer(node, joined.url)
    record = await deliverer.run(files)
    assert record.state is SliceState.READY
    # What is sent has no header of the whole model with it.
    assert record.transferred_bytes > here.file_bytes + 10_000
    assert deliverer.seen[-1].done_bytes == here.file_bytes
    again = await deliverer.run(await files_of(location))
    assert again == record


async def test_a_node_that_cannot_fetch_is_sent_what_is_here(
    node: RunningAgent, hub: HubProcess, location: str, tmp_path: Path
) -> None:
    # The agent joined nothing, though the address says so.
    record = await Deliverer(node, hub.url).run(await files_of(str(qwen3moe())))
    assert record.state is SliceState.READY
    assert record.transferred_bytes < cut_here(tmp_path, *CHOSEN).file_bytes + 10_000


async def test_a_near_node_is_sent_what_is_here(
    node: RunningAgent, joined: HubClient, tmp_path: Path
) -> None:
    record = await Deliverer(node, None).run(await files_of(str(qwen3moe())))
    assert record.transferred_bytes < cut_here(tmp_path, *CHOSEN).file_bytes + 10_000


async def test_a_near_node_that_joined_nothing_is_named_with_a_hint(
    node: RunningAgent, hub: HubProcess, location: str
) -> None:
    with pytest.raises(LinkcppError, match="attic did not get its experts from the hub") as raised:
        await Deliverer(node, None).run(await files_of(location))
    assert f"linkcpp join {hub.url}" in (raised.value.hint or "")
    assert "--model FILE" in (raised.value.hint or "")


async def test_what_is_damaged_in_the_cache_is_made_again(location: str, tmp_path: Path) -> None:
    chosen = segments(*CHOSEN)
    for place in (str(qwen3moe()), location):
        files = await files_of(place)
        made = await files.backbone(lambda *_: None)
        paths = [made.path, await files.kept_slice(chosen, lambda _: None)]
        whole = [path.read_bytes() for path in paths]
        promised = await files.true_manifest(chosen)
        small = [path for path in cache_folder().rglob("hub-*") if path.is_file()]
        flip(paths[0], 4000)
        for path in (paths[1], *small, *files.folder.glob("*.hashes")):
            flip(path, path.stat().st_size - 40)
        # The same supervisor after a failure, and the next launch.
        for users in (files, await files_of(place)):
            assert await users.backbone(lambda *_: None) == made
            assert await users.kept_slice(chosen, lambda _: None) == paths[1]
            assert await users.true_manifest(chosen) == promised
            assert [path.read_bytes() for path in paths] == whole
            flip(made.path, 4000)


async def test_a_hollow_model_that_was_damaged_is_refused(tmp_path: Path) -> None:
    with open_model(qwen3moe()) as model:
        (written,) = write_backbone(model, tmp_path / "hollow.gguf", lambda _: None)
    files = await files_of(str(written.path))
    assert (await files.backbone(lambda *_: None)).path == written.path
    flip(written.path, 4000)
    with pytest.raises(LinkcppError, match=r"hollow\.gguf is damaged"):
        await files.backbone(lambda *_: None)


@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_slice_that_its_node_lost_is_brought_there_again(
    is_removed: bool, node: RunningAgent, tmp_path: Path
) -> None:
    deliverer = Deliverer(node, None)
    files = await files_of(str(qwen3moe()))
    record = await deliverer.run(files)
    held = node.agent.slices.get(record.slice_id).path
    if is_removed:
        shutil.rmtree(data_folder())
        shutil.rmtree(cache_folder())
        shutil.rmtree(state_folder())
    else:
        flip(held, held.stat().st_size - 40)
    again = await deliverer.run(files)
    assert again.state is SliceState.READY
    assert again.transferred_bytes > record.transferred_bytes
    assert held.read_bytes() == cut_here(tmp_path, *CHOSEN).path.read_bytes()


async def test_a_slice_with_other_weights_than_the_hubs_is_fetched_anew(
    node: RunningAgent, joined: HubClient, location: str, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    content = bytearray(qwen3moe().read_bytes())
    with open_model(qwen3moe()) as model:
        _, tensor = next(t for t in model.tensors if t[1].name == "blk.0.ffn_up_exps.weight")
        content[tensor.offset_bytes] ^= 1
    other.write_bytes(content)
    await Deliverer(node, None).run(await files_of(str(other)))
    record = await Deliverer(node, joined.url).run(await files_of(location))
    theirs = await node.client.slice_manifest(record.slice_id)
    true = await (await files_of(location)).true_manifest(segments(*CHOSEN))
    assert true is not None
    assert theirs.tensors == true.tensors
