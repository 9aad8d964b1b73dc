"""Calls made up from the API's own description: whatever fits it, and much that does not."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from sqlalchemy import insert

from linkcpp.hub.database import open_database
from linkcpp.hub.identity import load_hub_identity
from linkcpp.hub.schema import MACHINES
from linkcpp.registry.keys import make_keys
from linkcpp.registry.records import Role
from tests.support.lengths import repeated

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path: Path, database_url: str | None) -> Iterator[tuple[str, dict[str, str]]]:
    """A hub as users run it: its address, and a token of each role."""
    tokens = enter_machines(tmp_path, database_url)
    command = [sys.executable, "-m", "linkcpp", "hub", "--data", str(tmp_path), "--port", "0"]
    environment = os.environ | ({"LINKCPP_DATABASE": database_url} if database_url else {})
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0], tokens
    finally:
        process.terminate()
        process.communicate(timeout=60)


def enter_machines(data: Path, database_url: str | None) -> dict[str, str]:
    engine, identity = open_database(database_url, data), load_hub_identity(data, create=True)
    now, tokens = time.time(), {}
    with engine.begin() as connection:
        for role in Role:
            keys, node_id = make_keys(), str(uuid.uuid4())
            row = {"signing_key": keys.signing_public, "edge_key": keys.edge_public}
            row |= {"token_id": "", "node_id": node_id, "name": role.value, "role": role.value}
            connection.execute(insert(MACHINES).values(joined_at=now, **row))
            issued = identity.issue(node_id, role, now=now, lifetime_seconds=3600, joined_at=now)
            tokens[role.value] = issued.token
    engine.dispose()
    return tokens


def test_no_call_that_can_be_made_up_finds_a_defect(hub: tuple[str, dict[str, str]]) -> None:
    url, tokens = hub
    with httpx.Client(base_url=url) as http:
        described = http.get("/v1/openapi.json").json()
        found = list(schemathesis.openapi.from_dict(described).get_all_operations())
        operations = [each.ok() for each in found if isinstance(each, Ok)]
        assert len(operations) == sum(len(item) for item in described["paths"].values())
        statuses: set[int] = set()
        for operation in operations:
            roles = operation.definition.raw.get("x-roles", ())
            headers = {"Authorization": f"Bearer {tokens[roles[0]]}"} if roles else {}
            for mode in GenerationMode:
                statuses |= call_many_times(operation, mode, url, headers)
        assert {200, 201, 204, 404, 422} <= statuses
        assert http.get("/v1/health").status_code == 200


def call_many_times(
    operation: Any, mode: GenerationMode, url: str, headers: dict[str, str]
) -> set[int]:
    """Make calls of one kind; return the statuses that came."""
    statuses = set()

    @settings(
        max_examples=repeated(8),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), address=st.ip_addresses(v=4))
    def call(case: schemathesis.Case[Any], address: object) -> None:
        # Each call from an address of its own: limits would hide what lies behind them.
        headers["X-Forwarded-For"] = str(address)
        response = case.call(base_url=url, headers=headers)
        assert response.status_code < 500, (case, response.text)
        statuses.add(response.status_code)

    with contextlib.suppress(Unsatisfiable):  # some calls have nothing that could be wrong
        call()
    return statuses
