"""Fixtures of this room's tests."""

import pytest

from tests.model.web_server import Server


@pytest.fixture
def server(web: Server) -> Server:
    """The web server, by the name that it has here."""
    return web
