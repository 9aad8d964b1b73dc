"""Keys and credentials on disk: made once, for their owner only; known peers stay who they are."""

import stat
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from linkcpp.cli.join_token import own_identity
from linkcpp.cluster.identity import host_name
from linkcpp.common.config_file import config_path
from linkcpp.common.errors import LinkcppError
from linkcpp.registry.credentials import (
    HubCredentials,
    list_credentials,
    load_credentials,
    pin_peer,
    save_credentials,
)
from linkcpp.registry.encoding import decode, encode, fingerprint
from linkcpp.registry.keys import keys_path, load_keys, make_keys
from linkcpp.registry.records import NodeToken, Role
from linkcpp.registry.trust import check_hub_url, is_protected, websocket_url

HUB_ID = str(uuid.UUID(int=7))
NODE_ID = str(uuid.UUID(int=8))


def credentials(url: str = "https://hub.example", hub_id: str = HUB_ID) -> HubCredentials:
    token = NodeToken(token="a.b.c", role=Role.NODE, expires_at=1.8e9)
    return HubCredentials.model_validate(
        {
            "url": url,
            "hub_id": hub_id,
            "hub_public_key": make_keys().signing_public,
            "node_token": token,
        }
    )


def test_a_machine_has_the_same_keys_whoever_asks_first_and_only_its_owner_reads_them() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: load_keys().edge_public, range(8)))
    assert made == {load_keys().edge_public}
    assert stat.S_IMODE(keys_path().stat().st_mode) == 0o600


def test_keys_that_others_may_read_or_that_are_none_are_refused_with_a_hint() -> None:
    load_keys()
    keys_path().chmod(0o644)
    with pytest.raises(LinkcppError, match="chmod 600"):
        load_keys()
    keys_path().write_text("{}")
    keys_path().chmod(0o600)
    with pytest.raises(LinkcppError, match="does not hold this machine's keys"):
        load_keys()


def test_a_machine_keeps_the_name_that_it_joined_a_hub_with() -> None:
    save_credentials(credentials().model_copy(update={"name": "attic"}))
    assert own_identity(None, "https://hub.example/").name == "attic"
    assert own_identity("cellar", "https://hub.example").name == "cellar"
    assert own_identity(None, "https://other.example").name == host_name()
    config_path().write_text('name = "tower"\n')
    assert own_identity(None, "https://hub.example").name == "tower"


def test_credentials_are_found_by_the_hubs_address() -> None:
    mine = credentials()
    save_credentials(mine)
    save_credentials(credentials("https://other.example", str(uuid.UUID(int=9))))
    assert load_credentials("https://hub.example/") == mine
    assert len(list_credentials()) == 2
    with pytest.raises(LinkcppError, match="did not join"):
        load_credentials("https://third.example")


def test_a_known_machine_with_another_key_is_refused_with_the_new_keys_fingerprint() -> None:
    first, second = make_keys().edge_public, make_keys().edge_public
    pin_peer(HUB_ID, NODE_ID, first)
    pin_peer(HUB_ID, NODE_ID, first)
    with pytest.raises(LinkcppError, match=fingerprint(second)):
        pin_peer(HUB_ID, NODE_ID, second)
    pin_peer(str(uuid.UUID(int=10)), NODE_ID, second)  # another hub, another trust


def test_bytes_have_one_text_only() -> None:
    assert decode(encode(b"\xff" * 32)) == b"\xff" * 32
    for odd in ("_" * 42 + "9", "a=", "a b", "+/+/"):
        with pytest.raises(ValueError, match="base64url"):
            decode(odd)


@pytest.mark.parametrize(
    ("url", "protected"),
    [
        ("https://hub.example", True),
        ("wss://hub.example/v1/relay", True),
        ("http://127.0.0.1:8720", True),
        ("http://[::1]:8720", True),
        ("http://localhost:8720", True),
        ("http://10.0.0.5:8720", False),
        ("http://hub.example", False),
        ("http://127.0.0.1.example", False),
    ],
)
def test_plain_http_is_for_loopback_only_unless_told(url: str, protected: bool) -> None:
    assert is_protected(url) is protected
    if protected:
        return
    with pytest.raises(LinkcppError, match="plain HTTP"):
        check_hub_url(url)
    assert check_hub_url(url, allow_plain=True) == url


@pytest.mark.parametrize(
    "url",
    ["", "hub.example", "ftp://a", "https://", "https://a:x", "https://u:geheim@a", "https://a?b"],
)
def test_what_is_no_address_of_a_hub_is_refused_without_repeating_a_password(url: str) -> None:
    with pytest.raises(LinkcppError, match="not the address of a hub") as refused:
        check_hub_url(url)
    assert "geheim" not in str(refused.value)


def test_a_websocket_keeps_the_path_of_the_hub() -> None:
    assert websocket_url("https://a.example/hub/", "/v1/events") == "wss://a.example/hub/v1/events"
    assert websocket_url("http://127.0.0.1:1", "/v1/relay") == "ws://127.0.0.1:1/v1/relay"


def test_the_folder_of_a_hub_is_below_the_users_config(linkcpp_home: Path) -> None:
    save_credentials(credentials())
    path = linkcpp_home / "config" / "hubs" / HUB_ID / "credentials.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
