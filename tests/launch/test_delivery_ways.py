"""Which way a slice takes to a node."""

import pytest

from linkcpp.launch.experts.delivery import Way, ways_to

HUB, WEB, SENT = Way(hub_model="m"), Way(url="https://web.example/m.gguf"), Way()


@pytest.mark.parametrize(
    ("is_far", "hub_model", "url", "is_here", "expected"),
    [
        # Behind a hub: from there, though the coordinator has the file.
        (True, "m", None, True, (HUB, SENT)),
        (True, "m", WEB.url, True, (HUB, WEB, SENT)),
        (True, None, None, True, (SENT,)),
        (True, None, WEB.url, False, (WEB,)),
        # Near: as without a hub, which is asked where nothing else is left.
        (False, "m", WEB.url, True, (WEB, SENT, HUB)),
        (False, "m", None, True, (SENT, HUB)),
        (False, "m", None, False, (HUB,)),
        (False, None, None, False, ()),
    ],
)
def test_ways_in_order(
    is_far: bool, hub_model: str | None, url: str | None, is_here: bool, expected: tuple[Way, ...]
) -> None:
    found = ways_to(is_far=is_far, hub_model=hub_model, url=url, is_here=is_here)
    assert found == expected
    assert [way.is_sent for way in found] == [way == SENT for way in found]
