"""The options of ``linkcpp join`` are remembered, not its name alone."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.node.join_options import JoinOptions, load_join_options, save_join_options
from linkcpp.registry.credentials import hub_folder, list_credentials
from tests.launch.hub_process import hub_process

pytestmark = pytest.mark.slow


def test_what_is_given_takes_the_place_of_what_was_given_before() -> None:
    earlier = JoinOptions(memory_limit_bytes=2 * 10**9, devices=("CPU",), no_listen=True)
    assert JoinOptions().over(earlier) == earlier
    given = JoinOptions(memory_limit_bytes=10**9, threads=2).over(earlier)
    assert given == earlier.model_copy(update={"memory_limit_bytes": 10**9, "threads": 2})
    assert given.words() == ["--memory 1.00GB", "--device CPU", "--threads 2", "--no-listen"]


def test_a_port_for_direct_links_ends_that_there_are_none_and_the_other_way_round() -> None:
    no_links, port = JoinOptions(no_listen=True), JoinOptions(port=9000)
    assert port.over(no_links) == port
    assert no_links.over(port) == no_links


def test_options_that_cannot_be_read_are_told_with_a_hint() -> None:
    save_join_options("h", JoinOptions(threads=2))
    assert load_join_options("h") == JoinOptions(threads=2)
    assert load_join_options("other") == JoinOptions()
    (hub_folder("h") / "join-options.json").write_text("nonsense")
    with pytest.raises(LinkcppError, match="--forget"):
        load_join_options("h")


def join(*words: str) -> str:
    """Run a node of a hub until it is there; returns what it said on stderr."""
    with subprocess.Popen(
        [sys.executable, "-m", "linkcpp.cli.main", "join", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() != "", process.communicate()[1]
        process.send_signal(signal.SIGINT)
        return process.communicate(timeout=60)[1]


def test_a_node_that_joins_again_gives_no_more_than_it_was_told_before(tmp_path: Path) -> None:
    with hub_process(tmp_path) as hub:
        words = ("token", "create", "--role", "node", "--data", str(hub.data))
        (tmp_path / "token").write_text(hub._run(*words))
        token = f"@{tmp_path / 'token'}"
        first = join(hub.url, "--token", token, "--memory", "900MB", "--no-listen")
        assert "As before" not in first
        assert "As before: --memory 900MB --no-listen" in join(hub.url)
        assert "As before: --no-listen" in join(hub.url, "--memory", "800MB")
        (known,) = list_credentials()
        assert load_join_options(known.hub_id).memory_limit_bytes == 800_000_000
        assert "As before" not in join(hub.url, "--forget", "--no-listen")
        assert load_join_options(known.hub_id) == JoinOptions(no_listen=True)
