"""A node's slices from its hub: checked by the hub's hashes, with the node's own token, resumed."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from linkcpp.common.request_ids import begin_request
from linkcpp.engine.records import EngineLocation
from linkcpp.model.slices.manifest import manifest_path, read_manifest
from linkcpp.node import slice_fetch
from linkcpp.node.client import NodeRefusedError
from linkcpp.node.records import SliceRecord, SliceRequest, SliceState
from tests.hub.weights.small_hub import SmallHub, add
from tests.hub.weights.test_fetching import HubModelFile
from tests.model.web_server import Server
from tests.node.agents import RunningAgent, running_agent
from tests.node.slices import cut_here, request_for
from tests.node.test_slices import file_of, until_received
from tests.support.models import qwen3moe

CHOSEN = ((0, 0, 3), (2, 4, 9))
ALL = tuple((layer, 0, 11) for layer in range(4))


class Joined:
    """The hub that a node joined; ``tokens`` are given one after the other, the last for ever."""

    def __init__(self, url: str, *tokens: str) -> None:
        self.url = url
        self.tokens = list(tokens or ("node-token",))

    async def token(self) -> str:
        return self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    add(tmp_path / "models", qwen3moe())
    with SmallHub(tmp_path / "models") as running:
        yield running


@pytest.fixture
async def node(stock_engine: EngineLocation) -> AsyncIterator[RunningAgent]:
    async with running_agent(stock_engine) as running:
        yield running


def hub_request(*ranges: tuple[int, int, int], url: str | None = None) -> SliceRequest:
    known = request_for("http://x", *ranges)
    return known.model_copy(update={"url": url, "hub_model": "m"})


async def fetched(node: RunningAgent, request: SliceRequest) -> SliceRecord:
    asked = await node.client.fetch_slice(request)
    return await node.client.wait_slice(asked.slice_id)


async def test_a_node_takes_its_slice_from_the_hub_and_nothing_else(
    node: RunningAgent, hub: SmallHub, tmp_path: Path
) -> None:
    node.agent.slices.hub = Joined(hub.url)
    here = cut_here(tmp_path, *CHOSEN)
    begin_request([(b"x-request-id", b"of-who-asked-the-node")])
    record = await fetched(node, hub_request(*CHOSEN))
    assert file_of(record.slice_id).read_bytes() == here.path.read_bytes()
    assert hub.request_ids == {b"of-who-asked-the-node"}
    assert record.transferred_bytes == hub.sent_bytes
    by_kind = {kind: sum(n for k, n in hub.sent if k == kind) for kind, _ in hub.sent}
    assert by_kind["slice"] == here.copied_bytes
    assert by_kind["header"] < 13_000
    assert by_kind["m"] + by_kind["manifest"] < manifest_path(here.path).stat().st_size + 2000
    assert await node.client.slice_manifest(record.slice_id) == read_manifest(here.path).model_copy(
        update={"file_name": "slice.gguf"}
    )
    # Neither the token nor anything else of the fetching stays.
    left = sorted(path.name for path in file_of(record.slice_id).parent.iterdir())
    assert left == [".slice.gguf.checked", "slice.gguf", "slice.gguf.manifest.json"]


async def test_a_killed_fetch_goes_on_and_takes_nothing_twice(
    node: RunningAgent, hub: SmallHub, tmp_path: Path
) -> None:
    node.agent.slices.hub = Joined(hub.url)
    here = cut_here(tmp_path, *ALL)
    hub.pause_after("slice", here.copied_bytes // 2)
    asked = await node.client.fetch_slice(hub_request(*ALL))
    name = asked.slice_id
    await until_received(node.client, name, here.file_bytes // 4)
    (program,) = fetching_programs()
    shown = " ".join(program.cmdline()) + str(program.environ())
    assert "node-token" not in shown
    folder = file_of(name).parent
    assert (folder / "fetch-token").stat().st_mode & 0o777 == 0o600
    assert "node-token" not in (folder / "fetch.json").read_text()
    killed = await node.client.slice(name)
    program.kill()
    with pytest.raises(NodeRefusedError):
        await node.client.wait_slice(name)
    hub.go_on.set()
    record = await fetched(node, hub_request(*ALL))
    assert file_of(name).read_bytes() == here.path.read_bytes()
    slab = max(tensor.slab_bytes for tensor in read_manifest(here.path).tensors)
    # One unfinished slab for each of four connections, and what the hub tells of the model.
    again = record.transferred_bytes - killed.transferred_bytes
    assert again <= here.copied_bytes - (killed.received_bytes - 2000) + 4 * slab + 4000


def fetching_programs() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        words = process.cmdline()
        if "linkcpp.node.slice_fetcher" in words and "keeper" not in " ".join(words[:4]):
            found.append(process)
    return found


async def test_a_token_that_runs_out_is_renewed_while_the_slice_comes(
    node: RunningAgent, hub: SmallHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slice_fetch, "RENEW_SECONDS", 0.1)
    here = cut_here(tmp_path, *ALL)
    node.agent.slices.hub = Joined(hub.url, "node-token", "second-token")
    hub.tokens["second-token"] = hub.tokens["node-token"]
    hub.pause_after("slice", here.copied_bytes // 2)
    asked = await node.client.fetch_slice(hub_request(*ALL))
    await until_received(node.client, asked.slice_id, here.file_bytes // 4)
    del hub.tokens["node-token"]
    hub.go_on.set()
    record = await node.client.wait_slice(asked.slice_id)
    assert file_of(record.slice_id).read_bytes() == here.path.read_bytes()


async def test_a_slab_that_is_wrong_at_the_hub_is_named(node: RunningAgent, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(qwen3moe().read_bytes())
    add(tmp_path / "models", model)
    with HubModelFile(model) as file:
        name, expert = file.spoil(layer=2, expert=5)
    with SmallHub(tmp_path / "models") as hub:
        node.agent.slices.hub = Joined(hub.url)
        asked = await node.client.fetch_slice(hub_request(*CHOSEN))
        with pytest.raises(NodeRefusedError, match=f"expert {expert} of {name}") as error:
            await node.client.wait_slice(asked.slice_id)
        assert hub.url in str(error.value)
        assert not file_of(asked.slice_id).exists()


async def test_the_web_is_asked_first_and_the_hub_has_the_last_word(
    node: RunningAgent, hub: SmallHub, web: Server, tmp_path: Path
) -> None:
    node.agent.slices.hub = Joined(hub.url)
    content = bytearray(qwen3moe().read_bytes())
    here = cut_here(tmp_path, *ALL)
    for at in range(len(content) // 2, len(content), 100_000):
        content[at] ^= 1
    web.files["/m.gguf"] = bytes(content)
    record = await fetched(node, hub_request(*ALL, url=f"{web.url}/m.gguf"))
    assert file_of(record.slice_id).read_bytes() == here.path.read_bytes()
    from_hub = sum(size for kind, size in hub.sent if kind == "slice")
    assert 0 < from_hub < here.copied_bytes
    assert not any("node-token" in str(headers) for _, headers in web.seen)


async def test_a_node_without_a_hub_says_so(node: RunningAgent) -> None:
    asked = await node.client.fetch_slice(hub_request(*CHOSEN))
    with pytest.raises(NodeRefusedError, match="joined none"):
        await node.client.wait_slice(asked.slice_id)
    assert (await node.client.slice(asked.slice_id)).state is SliceState.FAILED


async def test_another_model_at_the_hub_is_refused(node: RunningAgent, hub: SmallHub) -> None:
    node.agent.slices.hub = Joined(hub.url)
    other = hub_request(*CHOSEN).model_copy(update={"model_digest": "0" * 64})
    asked = await node.client.fetch_slice(other)
    with pytest.raises(NodeRefusedError, match="another model"):
        await node.client.wait_slice(asked.slice_id)
    unknown = hub_request(*CHOSEN).model_copy(update={"hub_model": "other"})
    asked = await node.client.fetch_slice(unknown)
    with pytest.raises(NodeRefusedError, match="no model 'other'"):
        await node.client.wait_slice(asked.slice_id)
