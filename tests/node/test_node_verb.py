"""``linkcpp node`` as a person meets it."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from linkcpp.cluster.identity import host_name
from linkcpp.cluster.records import NodeRecord
from linkcpp.cluster.token import create_token, find_token, token_path
from linkcpp.common.errors import EXIT_NOT_NOW, LinkcppError
from linkcpp.common.request_ids import begin_request
from linkcpp.common.sockets import listen
from linkcpp.common.systemd import systemd_unit
from linkcpp.common.units import format_bytes
from linkcpp.engine.records import EngineLocation
from linkcpp.node.agent import engine_or_problem
from linkcpp.node.connector import open_client
from linkcpp.node.limits import AGENT_BYTES
from linkcpp.node.records import ServerRequest
from tests.node.agents import agent_process


def run_node(*words: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "linkcpp.cli.main", "node", "--no-mdns", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, **({"LINKCPP_HOME": str(home)} if home else {})},
    )


def test_a_taken_port_is_told_in_one_sentence_with_the_hint() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_node("--host", "127.0.0.1", "--port", str(port))
    # A service manager starts it again: the port may become free.
    assert done.returncode == EXIT_NOT_NOW
    assert f"Port {port} of 127.0.0.1 is taken" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--memory", "lots"), "'lots' is not a size"),
        (("--host", "192.0.2.1", "--port", "0"), "Cannot listen on 192.0.2.1"),
        (("--host", "a..b", "--port", "0"), "Cannot listen on 'a..b', which is not an address"),
    ],
)
def test_a_setting_that_cannot_be_is_told_in_one_sentence(
    words: tuple[str, ...], told: str
) -> None:
    done = run_node(*words)
    # An address may come with its interface.
    assert done.returncode == (EXIT_NOT_NOW if "192.0.2.1" in words else 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_node_whose_engine_does_not_work_runs_and_says_so(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    nothing = tmp_path / "no-engine"
    nothing.mkdir()
    async with (
        agent_process(stock_engine, tmp_path / "node", "--engine", str(nothing)) as agent,
        await open_client(agent.url, agent.token) as client,
    ):
        record: NodeRecord = await client.node()
        said = await asyncio.to_thread(agent.output.read_text)
    assert record.engine_problem is not None
    assert "engine problem" in said
    assert "offers nothing until its engine works" in said
    assert "hint" in said


def test_an_engine_that_is_not_there_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    engine = engine_or_problem(tmp_path)
    assert engine.problem is not None
    assert engine.problem.hint


def test_all_interfaces_means_ipv4_and_ipv6_on_one_port() -> None:
    sockets = listen(None, 0)
    ports = {opened.getsockname()[1] for opened in sockets}
    families = {opened.family for opened in sockets}
    for opened in sockets:
        opened.close()
    assert len(ports) == 1
    assert socket.AF_INET in families


def test_a_port_that_only_ipv4_has_taken_is_refused_too() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with pytest.raises(LinkcppError, match="is taken"):
            listen(None, taken.getsockname()[1])


def test_the_systemd_unit_runs_this_command_with_these_settings() -> None:
    unit = systemd_unit(
        "node",
        "linkcpp node agent",
        ["/opt/my tools/linkcpp", "node", "--name", "50% of $HOME"],
        {"LINKCPP_HOME": "/srv/linkcpp", "SECRET": "hidden"},
    )
    assert 'ExecStart="/opt/my tools/linkcpp" node --name "50%% of $$HOME"' in unit
    assert "Environment=LINKCPP_HOME=/srv/linkcpp" in unit
    assert "hidden" not in unit
    assert "RestartPreventExitStatus=2" in unit


def test_the_verb_prints_a_unit_for_its_own_options() -> None:
    done = run_node("--memory", "6GB", "--systemd-unit")
    assert done.returncode == 0
    assert "node --no-mdns --memory 6GB" in done.stdout
    assert "[Service]" in done.stdout


def test_a_node_without_a_token_waits_for_it_and_goes_on_by_itself(
    stock_engine: EngineLocation,
) -> None:
    assert stock_engine.rpc_server is not None
    program = [sys.executable, "-m", "linkcpp.cli.main"]
    words = ["node", "--no-mdns", "--host", "127.0.0.1", "--port", "0"]
    words += ["--engine", str(stock_engine.rpc_server.parent)]
    with subprocess.Popen(
        [*program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as node:
        try:
            assert node.stderr is not None
            assert node.stdout is not None
            told = next(line for line in node.stderr if "token" in line)
            assert find_token() is None
            # As it comes from another machine.
            other = "x" * 43
            subprocess.run(
                [*program, "token", "set"], input=other, capture_output=True, text=True, check=True
            )
            said = next(line for line in node.stdout if "is a node" in line)
        finally:
            node.terminate()
            node.communicate()
    assert "no cluster token yet and waits for it: run `linkcpp token create` here" in told
    assert f"`linkcpp token --show | ssh {host_name()} linkcpp token set`" in told
    assert "is a node: http://127.0.0.1:" in said
    assert find_token() == other


def test_a_token_that_others_may_read_is_not_waited_for() -> None:
    create_token()
    token_path().chmod(0o644)
    done = run_node("--host", "127.0.0.1", "--port", "0")
    assert done.returncode == 2
    assert "may be used by other users" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--memory", "10MB"), "leaves nothing to offer"),
        (("--device", "GPU7"), "This machine has no device 'GPU7'"),
    ],
)
def test_an_offer_that_would_be_nothing_is_refused(
    stock_engine: EngineLocation, words: tuple[str, ...], told: str
) -> None:
    assert stock_engine.rpc_server is not None
    engine = ("--engine", str(stock_engine.rpc_server.parent))
    done = run_node("--host", "127.0.0.1", "--port", "0", *engine, *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "hint" in done.stderr


async def test_what_a_limited_node_offers_adds_up_before_ones_eyes(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    async with agent_process(stock_engine, tmp_path / "node", "--memory", "300MB") as agent:
        said = await asyncio.to_thread(agent.output.read_text)
    assert "limit 300 MB" in said
    assert "kept for the rpc-server itself" in said
    assert f"{format_bytes(AGENT_BYTES)} for the agent" in said


async def test_a_second_node_with_the_folder_of_a_running_one_is_refused(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    async with agent_process(stock_engine, tmp_path / "node"):
        done = await asyncio.to_thread(
            run_node, "--host", "127.0.0.1", "--port", "0", home=tmp_path / "node"
        )
    assert done.returncode == EXIT_NOT_NOW
    assert "A node runs already with the state folder" in done.stderr


async def test_an_owner_bounds_the_threads_and_reads_in_json_who_asked_for_what(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    begin_request([(b"x-request-id", b"of-this-test")])
    options = ("--threads", "1", "--log-format", "json")
    async with (
        agent_process(stock_engine, tmp_path / "node", *options) as agent,
        await open_client(agent.url, agent.token) as client,
    ):
        request = ServerRequest(deployment="d", device="CPU", memory_bytes=2**26, threads=64)
        server = await client.create_server(request)
        commands = [process.cmdline() for process in agent.engine_processes()]
        rpc_server = next(
            words for words in commands if words[:1] == [str(stock_engine.rpc_server)]
        )
        assert rpc_server[rpc_server.index("-t") + 1] == "1"
        await client.delete(server.server_id)
        await client.servers()  # by its answer the line of the call before is written
        said = await asyncio.to_thread(agent.output.read_text)
    logged = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert {line["request_id"] for line in logged} == {"of-this-test"}
    assert any("starts an rpc-server" in line["message"] for line in logged)
    requests = [(one["method"], one["status"]) for one in logged if one["message"] == "request"]
    # The line of the last call may be there as well.
    assert requests[:2] == [("POST", 201), ("DELETE", 204)]
    assert agent.token not in said
