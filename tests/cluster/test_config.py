"""This machine's id, name and settings."""

import uuid

import pytest

from linkcpp.cluster.config import Config, load_config, parse_node_url
from linkcpp.cluster.identity import load_identity
from linkcpp.common.config_file import config_path
from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import state_folder


def write_config(text: str) -> None:
    config_path().parent.mkdir(parents=True, exist_ok=True)
    config_path().write_text(text)


def test_the_id_of_a_machine_survives_restarts() -> None:
    first = load_identity()
    assert uuid.UUID(first.node_id).version == 4
    assert load_identity("attic").node_id == first.node_id
    assert load_identity("attic").name == "attic"


def test_a_broken_id_file_is_named_with_a_hint() -> None:
    load_identity()
    (state_folder() / "node-id").write_text("rubbish")
    with pytest.raises(LinkcppError, match=r"node-id does not hold.*Delete the file"):
        load_identity()


def test_without_a_file_the_settings_are_the_defaults() -> None:
    assert load_config() == Config()
    assert load_config().mdns


def test_settings_are_read_with_units_and_short_addresses() -> None:
    write_config('name = "attic"\nnodes = ["10.0.0.5", "fe80::1%eth0"]\nmemory_limit = "6GB"\n')
    config = load_config()
    assert config.nodes == ("http://10.0.0.5:8716", "http://[fe80::1%eth0]:8716")
    assert config.memory_limit_bytes == 6 * 10**9


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("memroy_limit = 3", "'memroy_limit' is not known"),
        ('memory_limit = "lots"', "'lots' is not a size"),
        ("memory_limit = 0", "memory_limit: Input should be greater than 0"),
        ('nodes = ["ftp://x"]', "'ftp://x' is not the address of a node"),
        ("nodes = 3", "nodes: Input should be a valid tuple"),
        ("name = ", "cannot be read"),
        ("memory_limit = '9223372036854775808B'", "memory_limit: Input should be less than"),
        ("memory_limit = 24", "The size '24' has no unit"),
        ("memory_limit = 1.5", "The size '1.5' has no unit"),
        ("memory_limit_bytes = 24000000000", "the key 'memory_limit_bytes' is not known"),
        (f"memory_limit = {'9' * 5000}", "cannot be read"),
        (f"memory_limit = '{'9' * 400}GB'", "is not a size"),
        (f"engine = {'[' * 5000}{']' * 5000}", "nested too deep"),
    ],
)
def test_a_mistake_in_the_settings_is_told_by_name(text: str, told: str) -> None:
    write_config(text)
    with pytest.raises(LinkcppError) as error:
        load_config()
    assert told in str(error.value)
    assert str(config_path()) in str(error.value)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("10.0.0.5", "http://10.0.0.5:8716"),
        ("attic.local:9000/", "http://attic.local:9000"),
        ("https://attic.example/linkcpp", "https://attic.example:443/linkcpp"),
        ("::1", "http://[::1]:8716"),
        ("http://[fe80::1%25eth0]:9", "http://[fe80::1%eth0]:9"),
    ],
)
def test_people_may_write_an_address_as_they_are_used_to(text: str, url: str) -> None:
    assert parse_node_url(text) == url


@pytest.mark.parametrize(
    "text",
    ["", "http://", "http://a b", "http://h:99999", "http://h/?q", "[::", "h:0"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(LinkcppError, match="not the address of a node"):
        parse_node_url(text)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(LinkcppError, match="no user name or password") as refused:
        parse_node_url("http://user:secret@h")
    assert "secret" not in str(refused.value)
