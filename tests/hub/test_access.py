"""Every call of the API, as its description lists them, with every kind of token."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fastapi import FastAPI
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from linkcpp.hub.access import TokenCheck
from linkcpp.hub.errors import ApiError
from linkcpp.hub.roles import check_routes
from linkcpp.registry.records import NodeToken, Role
from linkcpp.registry.trust import websocket_url
from tests.hub.hubs import RunningHub, running_hub

OPEN = {"/v1/health", "/v1/openapi.json", "/v1/join", "/v1/tokens"}
PLACEHOLDERS = {
    "{node_id}": "00000000-0000-4000-8000-000000000000",
    "{token_id}": "00000000-0000-4000-8000-000000000000",
    "{edge_id}": "0" * 32,
    "{name}": "no-such-model",
}


class Call(NamedTuple):
    """One call, and the roles that the description says may make it."""

    method: str
    path: str
    roles: tuple[str, ...]


@pytest.fixture
async def hub(tmp_path: Path) -> Any:
    """Who may call what does not depend on the database."""
    async with running_hub(tmp_path / "hub", None) as running:
        yield running


async def described_calls(hub: RunningHub) -> list[Call]:
    schema = (await hub.http.get("/v1/openapi.json")).json()
    return list(_calls(schema))


def _calls(schema: dict[str, Any]) -> Iterator[Call]:
    for path, item in schema["paths"].items():
        concrete = path
        for placeholder, value in PLACEHOLDERS.items():
            concrete = concrete.replace(placeholder, value)
        assert "{" not in concrete, f"{path} has a parameter that this test does not know"
        for method, operation in item.items():
            yield Call(method.upper(), concrete, tuple(operation.get("x-roles", ())))


async def status_and_code(hub: RunningHub, call: Call, token: str | None) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    if call.path == "/v1/events":
        try:
            async with connect(websocket_url(hub.url, call.path), additional_headers=headers):
                return 101, ""
        except InvalidStatus as error:
            body = json.loads(bytes(error.response.body or b""))
            return error.response.status_code, body["code"]
    body = {} if call.method in ("POST", "PUT") else None
    response = await hub.http.request(call.method, call.path, headers=headers, json=body)
    is_error = response.status_code >= 400
    return response.status_code, response.json()["code"] if is_error else ""


async def test_only_four_calls_are_open_and_all_others_name_their_roles(hub: RunningHub) -> None:
    calls = await described_calls(hub)
    assert len(calls) >= 24
    assert {call.path for call in calls if not call.roles} == OPEN


async def test_no_call_is_answered_without_a_token_or_with_one_that_is_not_taken(
    hub: RunningHub,
) -> None:
    admin = await hub.machine(Role.ADMIN)
    tokens = {"none": None, "wrong": "x" * 43, "short": "x", "three parts": "a.b.c"}
    tokens["another hub's"] = (await _other_hubs_token(hub)).token
    tokens["a ticket's kind"] = await _edge_ticket(hub)
    for call in await described_calls(hub):
        for what, token in tokens.items() if call.roles else ():
            status, _ = await status_and_code(hub, call, token)
            assert status == 401, (call, what)
    assert (await hub.http.get("/v1/nodes", headers=admin.headers)).status_code == 200


async def test_no_call_is_answered_with_a_token_that_has_ended_or_of_a_machine_that_was_revoked(
    hub: RunningHub,
) -> None:
    admin = await hub.machine(Role.ADMIN)
    machines = {role: await hub.machine(role) for role in Role}
    for machine in machines.values():
        await admin.client.revoke_node(machine.node_id)
    calls = [call for call in await described_calls(hub) if call.roles]
    for call in calls:
        token = machines[Role(call.roles[0])].token
        assert await status_and_code(hub, call, token) == (403, "revoked"), call
    others = {role: await hub.machine(role) for role in Role}
    hub.clock.offset += 15 * 60
    for call in calls:
        token = others[Role(call.roles[0])].token
        assert await status_and_code(hub, call, token) == (401, "expired_token"), call


async def test_every_call_refuses_the_roles_that_it_does_not_name_and_knows_those_that_it_does(
    hub: RunningHub,
) -> None:
    machines = {role: await hub.machine(role) for role in Role}
    for call in await described_calls(hub):
        for role, machine in machines.items() if call.roles else ():
            status, code = await status_and_code(hub, call, machine.token)
            if role in call.roles:
                assert status not in (401, 403) and status < 500, (call, role, code)
            else:
                assert (status, code) == (403, "other_role"), (call, role)


async def test_metrics_are_for_admins_and_for_the_token_in_the_data_folder(
    hub: RunningHub,
) -> None:
    node = await hub.online_node()
    token = hub.hub.identity.metrics_token
    response = await hub.http.get("/metrics", headers={"Authorization": f"Bearer {token}"})
    assert 'linkcpp_hub_machines{presence="online",role="node"} 1.0' in response.text
    assert 'route="/v1/heartbeat",status="200"' in response.text
    assert node.token not in response.text
    other = await hub.http.get("/v1/nodes", headers={"Authorization": f"Bearer {token}"})
    assert other.status_code == 401


async def test_a_token_in_the_hubs_name_is_taken_from_its_operator_only(hub: RunningHub) -> None:
    for role, expected in ((Role.ADMIN, 200), (Role.BACKBONE, 403)):
        issued = hub.hub.identity.issue(
            hub.hub.identity.hub_id, role, now=hub.clock(), lifetime_seconds=60
        )
        headers = {"Authorization": f"Bearer {issued.token}"}
        assert (await hub.http.get("/v1/nodes", headers=headers)).status_code == expected


async def test_a_token_is_remembered_once_however_it_is_written_and_not_of_a_revoked_machine(
    hub: RunningHub,
) -> None:
    check = TokenCheck(hub.hub.identity, hub.hub.directory, hub.clock)
    node = await hub.machine(Role.NODE)
    for spaces in range(1, 50):
        header = b"Bearer" + b" " * spaces + node.token.encode() + b" " * spaces
        check.caller({"path": "/v1/gateways", "headers": [(b"authorization", header)]})
    assert len(check._claims) == 1
    other = await hub.machine(Role.NODE)
    await hub.hub.revoke(other.node_id)
    header = b"Bearer " + other.token.encode()
    with pytest.raises(ApiError, match="revoked"):
        check.caller({"path": "/v1/gateways", "headers": [(b"authorization", header)]})
    assert len(check._claims) == 1


async def test_methods_that_callers_make_up_are_no_labels_of_metrics(hub: RunningHub) -> None:
    for number in range(5):
        for path in ("/v1/health", "/v1/join", "/v1/nowhere"):
            await hub.http.request(f"MADEUP{number}", path)
    told = hub.hub.render_metrics().decode()
    assert "MADEUP" not in told
    assert 'linkcpp_hub_requests_total{method="",route="unknown",status="405"}' in told


async def test_every_answer_has_a_request_id_that_the_log_has_too(
    hub: RunningHub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "linkcpp")
    sent = (None, "launch-7f", "two\tcolumns", "x" * 65)
    headers = [{"X-Request-ID": request_id} if request_id else {} for request_id in sent]
    answers = [await hub.http.get("/v1/nodes", headers=each) for each in headers]
    logged = [one for one in caplog.records if getattr(one, "path", None) == "/v1/nodes"]
    told = [answer.headers["X-Request-Id"] for answer in answers]
    assert [vars(one)["request_id"] for one in logged] == told
    assert vars(logged[0])["status"] == 401
    # The caller's own is kept where it fits; all others are new ones.
    assert told[1] == "launch-7f"
    assert len({*told, *sent}) == 2 * len(sent) - 1


async def test_no_token_is_logged(hub: RunningHub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    token = await hub.join_token()
    await hub.join(hub.join_body(token))
    node = await hub.online_node()
    await hub.http.get("/v1/gateways", headers=node.headers)
    written = "".join(str(vars(record)) + record.getMessage() for record in caplog.records)
    assert token not in written
    assert node.token not in written


def test_an_application_with_a_route_that_names_no_roles_is_not_made() -> None:
    app = FastAPI()

    @app.get("/v1/forgotten")
    async def forgotten() -> None: ...

    with pytest.raises(RuntimeError, match="/v1/forgotten"):
        check_routes(route for route in app.routes if route.path == "/v1/forgotten")  # type: ignore[attr-defined]


async def _other_hubs_token(hub: RunningHub) -> NodeToken:
    folder = hub.hub.data.with_name("other")
    async with running_hub(folder, None) as other:
        return other.hub.identity.issue(
            other.hub.identity.hub_id, Role.ADMIN, now=hub.clock(), lifetime_seconds=60
        )


async def _edge_ticket(hub: RunningHub) -> str:
    node, backbone = await hub.online_node("porch"), await hub.machine(Role.BACKBONE)
    response = await hub.http.post(
        "/v1/edges", json={"node_id": node.node_id}, headers=backbone.headers
    )
    ticket: str = response.json()["ticket"]
    return ticket
