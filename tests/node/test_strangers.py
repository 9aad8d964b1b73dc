"""What strangers cost a node's real agent: nothing that its coordinator would notice."""

from pathlib import Path

import httpx
import pytest

from linkcpp.engine.records import EngineLocation
from linkcpp.node.connector import open_client
from tests.node.agents import agent_process
from tests.support.dripping import dripping

ATTACKERS = 560
CALLS = 20


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"GET / HTTP/1.1\r\nX-Endless: ", id="endless head"),
        pytest.param(b"", id="no head"),
        pytest.param(
            b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\nGET", id="one answer, then no more"
        ),
    ],
)
async def test_an_agent_serves_its_coordinator_while_strangers_hold_hundreds_of_connections(
    stock_engine: EngineLocation, tmp_path: Path, said: bytes
) -> None:
    async with agent_process(stock_engine, tmp_path / "node") as agent:
        port = httpx.URL(agent.url).port or 0
        async with await open_client(agent.url, agent.token) as known:
            await known.node()
            async with dripping(port, ATTACKERS, said):
                for _ in range(CALLS):
                    await known.node()
                    async with await open_client(agent.url, agent.token) as fresh:
                        await fresh.node()
