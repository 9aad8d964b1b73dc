"""Real agents and the real command on two hosts: network namespaces with a cable between them."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Host, two_hosts
from tests.cluster.peers import OTHER_TOKEN, TOKEN

# Advertises a node and takes connections, but never answers.
STALLING_ROGUE = """
import asyncio
from linkcpp.cluster.mdns import Advertisement, Advertiser
from linkcpp.cluster.records import NodeId

async def main():
    async def stall(reader, writer):
        print("token" if b"Bearer" in await reader.read(65536) else "asked", flush=True)
        await asyncio.sleep(3600)
    server = await asyncio.start_server(stall, "0.0.0.0", 0)
    told = Advertisement(node_id=NodeId("id-rogue"), name="rogue", engine_digest=None,
                         port=server.sockets[0].getsockname()[1], memory_class="64G")
    async with Advertiser(told, bind_host="0.0.0.0"):
        print("advertised", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    folder = tmp_path_factory.mktemp("hosts")
    write_token(folder / "token", TOKEN)
    with two_hosts(folder) as both:
        yield both


def write_token(path: Path, token: str) -> Path:
    path.write_text(token)
    path.chmod(0o600)
    return path


def named(nodes: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found = [node for node in nodes if node["name"] == name]
    assert len(found) == 1, nodes
    return found[0]


def test_a_node_on_another_host_is_found_at_every_address_that_is_really_its_own(
    hosts: tuple[Host, Host],
) -> None:
    far, near = hosts

    def is_known(nodes: list[dict[str, Any]]) -> bool:
        links = {node["name"]: node["link"] for node in nodes}
        far = links.get("far") or {}
        return far.get("bytes_per_second") is not None and "near" in links

    with far.agent("--name", "far"), near.agent("--name", "near"):
        nodes = near.discover_until(
            lambda nodes: is_known(nodes) and "fe80" in str(named(nodes, "far")["urls"])
        )
    # Both have docker0 with 172.17.0.1: told by the far host, it leads to the near one.
    node = named(nodes, "far")
    assert node["status"] == "ready", node
    assert f"http://{far.address}:8716" in node["urls"]
    link_local = [url for url in node["urls"] if "fe80" in url]
    assert link_local
    assert all("%cable" in url for url in link_local)
    assert not any("172.17" in url for url in node["urls"])
    assert node["link"]["rtt_ms"] > 0
    assert node["link"]["bytes_per_second"] > 0
    assert named(nodes, "near")["is_this_machine"]
    assert len(nodes) == 2


def test_a_node_is_found_by_its_link_local_address_alone(hosts: tuple[Host, Host]) -> None:
    far, near = hosts
    with far.agent("--name", "far"):
        nodes = near.discover_until(lambda nodes: "fe80" in str(nodes))
        url = next(url for url in named(nodes, "far")["urls"] if "fe80" in url)
        node = named(near.discover("--no-mdns", "--node", url), "far")
    assert node["urls"] == [url]
    assert node["status"] == "ready"


def test_a_node_with_another_token_and_a_rogue_that_stalls_are_told_as_such(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    far, near = hosts
    other = str(write_token(tmp_path / "other-token", OTHER_TOKEN))
    stranger_home = str(tmp_path / "stranger")
    with (
        far.agent("--name", "far"),
        far.agent(
            *("--name", "stranger", "--port", "8717"),
            LINKCPP_TOKEN_FILE=other,
            LINKCPP_HOME=stranger_home,
        ),
        far.running("-c", STALLING_ROGUE, until="advertised") as rogue,
    ):
        nodes = near.discover_until(
            lambda nodes: (
                {node["name"]: node["status"] for node in nodes}
                == {"far": "ready", "stranger": "wrong_token", "rogue": "stale"}
            )
        )
        assert rogue.stdout is not None
        assert rogue.stdout.readline() == "asked\n"
    assert named(nodes, "far")["status"] == "ready"
    assert named(nodes, "stranger")["status"] == "wrong_token"
    assert named(nodes, "rogue")["status"] == "stale"
    assert "no answer within" in named(nodes, "rogue")["reason"]


def test_a_node_that_is_killed_while_one_watches_becomes_stale(hosts: tuple[Host, Host]) -> None:
    far, near = hosts
    with far.agent("--name", "far") as agent:
        words = ("-m", "linkcpp.cli.main", "discover", "--watch", "--json", "--timeout", "2")
        with near.running(*words, until='"status": "ready"') as watch:
            agent.send_signal(signal.SIGKILL)
            assert watch.stdout is not None
            for line in watch.stdout:
                node = named(json.loads(line)["nodes"], "far")
                if node["status"] == "stale":
                    break
    assert node["record"] is None
    assert "switched off" in node["reason"]


def test_without_agents_the_command_says_what_to_check(hosts: tuple[Host, Host]) -> None:
    _, near = hosts
    process = near.start("-m", "linkcpp.cli.main", "discover", "--timeout", "0.5")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "5353" in out
