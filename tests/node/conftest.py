"""What tests of the node agent share."""

import pytest


@pytest.fixture(autouse=True)
def memory_speed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare every test a third of a second for a number that it ignores."""
    monkeypatch.setattr("linkcpp.cluster.measure.cpu_read_rate", lambda: 1e10)
