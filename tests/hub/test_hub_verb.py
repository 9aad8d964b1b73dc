"""`linkcpp hub` and the verbs below it, as a person uses them."""

import json
import os
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from linkcpp.cli.hub_tokens import meant_token, parse_lifetime
from linkcpp.cluster.identity import Identity
from linkcpp.cluster.records import NodeId
from linkcpp.common.errors import LinkcppError
from linkcpp.registry.client import HubClient, join_hub
from linkcpp.registry.edges import GatewayList
from linkcpp.registry.keys import make_keys
from linkcpp.registry.records import JoinTokenRecord, Role


class Running:
    """A hub with a gateway, its data, and what it printed when it began."""

    def __init__(self, data: Path) -> None:
        self.data = data
        command = [sys.executable, "-m", "linkcpp", "hub", "--data", str(data), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--gateway"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said = [self.process.stdout.readline() for _ in range(4)]
        self.url = self.said[0].split()[0]

    def stop(self) -> str:
        self.process.terminate()
        _, log = self.process.communicate(timeout=60)
        return log


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    hub = Running(tmp_path / "hub")
    yield hub
    if hub.process.poll() is None:
        hub.stop()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return linkcpp("hub", *words)


def linkcpp(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "linkcpp", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "160"},
        timeout=120,
        check=False,
    )


@pytest.mark.slow
async def test_a_hub_from_its_first_start_to_a_revoked_machine(
    running: Running, tmp_path: Path
) -> None:
    first = running.data / "admin-join-token"
    assert "is a hub and gateway" in running.said[0]
    assert str(first) in running.said[1]
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert stat.S_IMODE(running.data.stat().st_mode) == 0o700
    assert first.read_text().strip() not in "".join(running.said)

    here = ("--data", str(running.data))
    made = run("token", "create", "--role", "node", "--uses", "3", "--label", "attic", *here)
    token = made.stdout.strip()
    assert token.startswith("lcj_")
    listed = run("token", "list", "--json", *here)
    assert token not in listed.stdout
    assert {one["label"] for one in json.loads(listed.stdout)["tokens"]} == {"attic", "first admin"}

    (tmp_path / "token").write_text(token)
    for role, file, *words in (
        ("node", tmp_path / "token", "gateway", "--hub", running.url),
        ("admin", first, "join", running.url, "--no-listen"),
    ):
        refused = linkcpp(*map(str, words), "--token", f"@{file}")
        assert refused.returncode == 2
        assert f"is for the role {role}, not" in refused.stderr
    tokens = json.loads(run("token", "list", "--json", *here).stdout)["tokens"]
    assert [one["use_count"] for one in tokens] == [0, 0]

    identity = Identity(node_id=NodeId(str(uuid.uuid4())), name="attic")
    credentials = await join_hub(running.url, token, identity=identity, keys=make_keys())
    assert (credentials.node_token.role, credentials.name) == (Role.NODE, "attic")
    nodes = run("nodes", *here).stdout
    assert "attic" in nodes
    assert "the hub itself" in nodes
    assert run("revoke", "attic", *here).stdout == "attic is revoked.\n"
    again = run("revoke", "attic", *here)
    assert again.returncode == 2
    assert "No machine of this hub has" in again.stderr

    log = running.stop()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert any(line["path"] == "/v1/join" and line["status"] == 200 for line in lines)
    assert token not in log
    gone = run("nodes", *here)
    assert gone.returncode == 2
    assert "cannot be reached" in gone.stderr


async def test_the_hubs_own_gateway_is_where_the_hub_is_for_whoever_asks(running: Running) -> None:
    token = (running.data / "admin-join-token").read_text()
    identity = Identity(node_id=NodeId(str(uuid.uuid4())), name="desk")
    keys = make_keys()
    credentials = await join_hub(running.url, token, identity=identity, keys=keys)

    async def known(*_: object) -> object:
        return credentials.node_token

    async with HubClient(running.url, renew=known) as client:  # type: ignore[arg-type]
        told: GatewayList = await client.gateways()
    (own,) = told.gateways
    assert own.url == running.url.replace("http", "ws") + "/v1/relay"
    assert own.is_online


@pytest.mark.parametrize(
    ("word", "error", "hint"),
    [
        ("nosuch", "No join token that may still be used has the id or label 'nosuch'", "list`"),
        ("atic", "the id or label 'atic'", "Did you mean attic? "),
        ("lcj_secret", "has that id", "`linkcpp hub token list`"),
        ("cellar", "Several join tokens have", "with their ids"),
    ],
)
def test_a_token_that_is_not_there_is_told_with_a_hint(word: str, error: str, hint: str) -> None:
    tokens = [_token("attic"), _token("cellar"), _token("cellar"), _token("")]
    with pytest.raises(LinkcppError, match=error) as raised:
        meant_token(word, tokens)
    assert hint in (raised.value.hint or "")


def test_a_token_is_known_by_its_label_or_the_start_of_its_id() -> None:
    attic, other = _token("attic"), _token("")
    for word in ("attic", attic.token_id, attic.token_id[:8]):
        assert meant_token(word, [other, attic]) == attic


def _token(label: str) -> JoinTokenRecord:
    fields = {"created_at": 1, "expires_at": 2, "use_limit": 1, "use_count": 0}
    return JoinTokenRecord.model_validate(
        {"token_id": str(uuid.uuid4()), "role": Role.NODE, "label": label, "is_revoked": False}
        | fields
    )


def test_a_password_on_the_command_line_is_refused_before_anything_starts(tmp_path: Path) -> None:
    refused = run("--data", str(tmp_path), "--database", "postgresql+psycopg://u:geheim@h/n")
    assert refused.returncode == 2
    assert "process list" in refused.stderr
    assert "geheim" not in refused.stderr


def test_a_password_in_the_environment_is_refused_in_a_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINKCPP_DATABASE", "postgresql+psycopg://u:geheim@h/n")
    refused = run("--data", str(tmp_path), "--systemd-unit")
    assert refused.returncode == 2
    assert "in the unit's file" in refused.stderr
    assert "geheim" not in refused.stderr + refused.stdout


def test_a_unit_for_systemd_runs_the_same_command(tmp_path: Path) -> None:
    printed = run("--data", str(tmp_path / "a b"), "--gateway", "--systemd-unit").stdout
    (start,) = (line for line in printed.splitlines() if line.startswith("ExecStart="))
    assert start.endswith(f'-m linkcpp.cli.main hub --data "{tmp_path}/a b" --gateway')
    assert not (tmp_path / "a b").exists()


def test_verbs_for_a_folder_that_is_no_hubs_say_so(tmp_path: Path) -> None:
    refused = run("nodes", "--data", str(tmp_path / "nothing"))
    assert refused.returncode == 2
    assert "is not the data folder of a hub" in refused.stderr


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800), ("12h", 43200), ("7d", 604800)])
def test_lifetimes_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_lifetime(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "9999999d", "1.5h"])
def test_what_is_no_lifetime_is_refused(text: str) -> None:
    with pytest.raises(LinkcppError, match="30m, 12h or 7d"):
        parse_lifetime(text)
