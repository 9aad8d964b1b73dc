"""How a hub's model is named in one text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.common.errors import LinkcppError
from linkcpp.registry.discovering import parse_hub_node_url
from linkcpp.registry.hub_places import HubPlace, parse_hub_location
from linkcpp.registry.models import NAME_PATTERN


@given(
    hub=st.sampled_from(["https://hub.example", "http://127.0.0.1:9", "https://x.example/hub"]),
    name=st.from_regex(NAME_PATTERN, fullmatch=True),
)
def test_a_location_leads_back_to_hub_and_name(hub: str, name: str) -> None:
    place = HubPlace(hub, name)
    assert parse_hub_location(place.location) == place
    assert parse_hub_location(HubPlace(hub + "/", name).location) == place
    assert parse_hub_node_url(place.location) is None


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
