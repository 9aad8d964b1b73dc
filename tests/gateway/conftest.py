"""Fixtures of the gateway's tests."""

from collections.abc import AsyncIterator

import pytest

from tests.gateway.gateways import Gateway, running_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway() as running:
        yield running
