"""How a hub's model is named in one text."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.cluster.records import NodeId
from linkcpp.common.errors import LinkcppError
from linkcpp.registry.credentials import HubCredentials, save_credentials
from linkcpp.registry.hub_location import HubLocation, parse_hub_location, parse_hub_node_url
from linkcpp.registry.keys import make_keys
from linkcpp.registry.model_lookup import load_model_anywhere, require_here
from linkcpp.registry.models import NAME_PATTERN
from linkcpp.registry.records import NodeToken, Role


@given(
    hub=st.sampled_from(["https://hub.example", "http://127.0.0.1:9", "https://x.example/hub"]),
    name=st.from_regex(NAME_PATTERN, fullmatch=True),
)
def test_a_location_leads_back_to_hub_and_name(hub: str, name: str) -> None:
    at_hub = HubLocation(hub, name)
    assert parse_hub_location(at_hub.text) == at_hub
    assert parse_hub_location(HubLocation(hub + "/", name).text) == at_hub
    assert parse_hub_node_url(at_hub.text) is None


@pytest.mark.parametrize("text", ["122B", "model.gguf", "https://hub.example/m.gguf", "hubs/m"])
def test_what_is_no_hubs_is_left_to_others(text: str) -> None:
    assert parse_hub_location(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "hub+https://hub.example",
        "hub+https://hub.example#model=",
        "hub+https://hub.example#model=../secret",
        "hub+https://hub.example#model=a b",
        "hub+https://hub.example#3d9b3a1e-0f0c-4f6b-8a51-6b3c9d1c2f10",
        "hub+ftp://hub.example#model=m",
        "hub+https://hub.example?key=1#model=m",
    ],
)
def test_a_malformed_location_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(LinkcppError, match="does not name a model of a hub") as raised:
        parse_hub_location(text)
    assert "#model=NAME" in (raised.value.hint or "")


@pytest.mark.parametrize("text", ["hub+https://hub.example#model=qwen", "qwen"])
def test_a_verb_that_reads_all_weights_says_that_a_hub_is_not_enough(text: str) -> None:
    with pytest.raises(LinkcppError, match="`linkcpp verify` reads all weights") as raised:
        require_here(text, "verify")
    assert raised.value.hint == "Name its GGUF file."


@pytest.mark.parametrize("text", ["qwen.gguf", "models/qwen", "https://hub.example/m.gguf"])
def test_what_names_a_file_is_left_to_whoever_opens_it(text: str) -> None:
    require_here(text, "verify")


def test_a_name_that_only_a_hub_may_know_is_told_with_the_hubs_of_this_machine() -> None:
    with pytest.raises(LinkcppError, match="neither a file nor a known preset") as raised:
        load_model_anywhere("qwen")
    assert "hub+" not in (raised.value.hint or "")
    token = NodeToken(token="t" * 20, role=Role.BACKBONE, expires_at=1e9)
    save_credentials(
        HubCredentials(
            url="https://hub.example",
            hub_id=NodeId(str(uuid.uuid4())),
            hub_public_key=make_keys().signing_public,
            node_token=token,
        )
    )
    with pytest.raises(LinkcppError, match="neither a file nor a known preset") as raised:
        load_model_anywhere("qwen")
    assert "hub+https://hub.example#model=qwen" in (raised.value.hint or "")
