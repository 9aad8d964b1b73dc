"""Join tokens and node tokens: exchanged, limited, renewed, revoked."""

import asyncio
import uuid
from pathlib import Path

import pytest

from linkcpp.common.access import RateLimit
from linkcpp.registry.connection import HubRefusedError
from linkcpp.registry.encoding import nonce
from linkcpp.registry.keys import make_keys
from linkcpp.registry.proofs import renew_request
from linkcpp.registry.records import JoinTokenRequest, RenewRequest, Role
from tests.hub.hubs import Machine, RunningHub, running_hub


def code(response: object) -> str:
    told: str = response.json()["code"]  # type: ignore[attr-defined]
    return told


async def test_a_join_token_is_used_once_and_a_lost_answer_costs_no_second_use(
    hub: RunningHub,
) -> None:
    token, keys, node_id = await hub.join_token(), make_keys(), str(uuid.uuid4())
    first = await hub.join(hub.join_body(token, node_id=node_id, keys=keys))
    again = await hub.join(hub.join_body(token, node_id=node_id, keys=keys))
    other = await hub.join(hub.join_body(token))
    assert [one.status_code for one in (first, again, other)] == [200, 200, 401]
    assert code(other) == "used_token"


async def test_many_that_join_at_once_use_a_token_no_more_often_than_allowed(
    hub: RunningHub,
) -> None:
    token = await hub.join_token(uses=5)
    answers = await asyncio.gather(*(hub.join(hub.join_body(token)) for _ in range(12)))
    assert sorted(one.status_code for one in answers) == [200] * 5 + [401] * 7


@pytest.mark.parametrize(
    ("role", "wanted", "verb"),
    [
        (Role.GATEWAY, (Role.NODE, Role.BACKBONE, Role.ADMIN), "linkcpp gateway --hub URL"),
        (Role.BACKBONE, (Role.NODE,), "linkcpp join URL --token -` without options for nodes"),
        (Role.NODE, (Role.GATEWAY,), "linkcpp join URL"),
    ],
)
async def test_a_token_of_another_role_is_refused_and_keeps_its_use(
    hub: RunningHub, role: Role, wanted: tuple[Role, ...], verb: str
) -> None:
    token = await hub.join_token(role)
    body = hub.join_body(token)
    refused = await hub.join(body.model_copy(update={"roles": wanted}))
    assert (refused.status_code, code(refused)) == (409, "token_of_other_role")
    assert f"is for the role {role}, not" in refused.json()["message"]
    assert verb in refused.json()["hint"]
    assert f"--role {wanted[0]}`" in refused.json()["hint"]
    taken = await hub.join(hub.join_body(token).model_copy(update={"roles": (role,)}))
    assert taken.status_code == 200


@pytest.mark.parametrize("how", ["wrong", "expired", "revoked"])
async def test_a_join_token_that_is_not_valid_lets_nobody_in(hub: RunningHub, how: str) -> None:
    token = await hub.join_token(lifetime_seconds=60)
    if how == "wrong":
        token = "lcj_" + "x" * 43
    elif how == "expired":
        hub.clock.offset += 61
    else:
        admin = await hub.machine(Role.ADMIN)
        listed = (await admin.client.join_tokens()).tokens
        (mine,) = (one for one in listed if one.use_count == 0)
        await admin.client.revoke_join_token(mine.token_id)
    refused = await hub.join(hub.join_body(token))
    assert refused.status_code == 401
    assert code(refused) == f"{how}_token"


async def test_the_secret_of_a_join_token_is_told_once_and_stored_nowhere(hub: RunningHub) -> None:
    admin = await hub.machine(Role.ADMIN)
    made = await admin.client.create_join_token(
        JoinTokenRequest(role=Role.NODE, lifetime_seconds=60, label="for the attic")
    )
    assert made.token.startswith("lcj_")
    listed = await hub.http.get("/v1/join-tokens", headers=admin.headers)
    assert made.record.token_id in listed.text
    assert made.token not in listed.text
    stored = hub.hub.data / "hub.sqlite3"
    for path in hub.hub.data.glob("hub.sqlite3*") if stored.exists() else ():
        assert made.token.encode() not in path.read_bytes()


@pytest.mark.parametrize("role", [Role.NODE, Role.BACKBONE, Role.ADMIN])
async def test_nobody_joins_with_the_hubs_own_id(hub: RunningHub, role: Role) -> None:
    token = await hub.join_token(role)
    refused = await hub.join(hub.join_body(token, node_id=hub.hub.identity.hub_id))
    assert (refused.status_code, code(refused)) == (409, "hub_id")
    assert (await hub.join(hub.join_body(token))).status_code == 200


async def test_an_id_that_another_machine_has_is_refused_until_that_one_is_revoked(
    hub: RunningHub,
) -> None:
    node = await hub.machine(Role.NODE)
    body = hub.join_body(await hub.join_token(), node_id=node.node_id)
    taken = await hub.join(body)
    assert (taken.status_code, code(taken)) == (409, "other_key")
    admin = await hub.machine(Role.ADMIN)
    await admin.client.revoke_node(node.node_id)
    keys = make_keys()
    anew = await hub.machine(Role.NODE, node_id=node.node_id, keys=keys)
    assert (await admin.client.node(node.node_id)).edge_key == keys.edge_public
    await anew.client.gateways()


async def test_a_revoked_machine_does_not_come_back_with_a_token_from_before(
    hub: RunningHub,
) -> None:
    token, keys, node_id = await hub.join_token(uses=2), make_keys(), str(uuid.uuid4())
    assert (await hub.join(hub.join_body(token, node_id=node_id, keys=keys))).status_code == 200
    admin = await hub.machine(Role.ADMIN)
    await admin.client.revoke_node(node_id)
    refused = await hub.join(hub.join_body(token, node_id=node_id, keys=keys))
    assert (refused.status_code, code(refused)) == (403, "revoked")


async def test_a_token_from_before_a_revocation_stays_worthless_when_the_machine_is_back(
    hub: RunningHub,
) -> None:
    node = await hub.machine(Role.NODE)
    admin = await hub.machine(Role.ADMIN)
    await admin.client.revoke_node(node.node_id)
    back = await hub.machine(Role.NODE, node_id=node.node_id, keys=node.keys)
    old = await hub.http.get("/v1/gateways", headers=node.headers)
    new = await hub.http.get("/v1/gateways", headers=back.headers)
    assert (old.status_code, new.status_code) == (401, 200)


@pytest.mark.parametrize("field", ["node_id", "name", "signing_key", "edge_key", "token"])
async def test_a_proof_covers_all_that_a_machine_tells_when_it_joins(
    hub: RunningHub, field: str
) -> None:
    body = hub.join_body(await hub.join_token())
    other = hub.join_body(await hub.join_token(), name="another")
    forged = body.model_copy(update={field: getattr(other, field)})
    refused = await hub.join(forged)
    assert (refused.status_code, code(refused)) == (401, "wrong_proof")


async def test_no_proof_is_taken_twice_or_late(hub: RunningHub) -> None:
    node = await hub.machine(Role.NODE)
    body = renewal(hub, node)
    assert (await renew(hub, body)) == (200, None)
    assert (await renew(hub, body)) == (401, "proof_used")
    late = renewal(hub, node)
    hub.clock.offset += 61
    assert (await renew(hub, late)) == (401, "proof_out_of_time")


async def test_a_client_renews_its_token_by_itself_before_and_after_it_ends(
    hub: RunningHub,
) -> None:
    node = await hub.machine(Role.NODE)
    await node.client.gateways()
    first = await node.client.token()
    hub.clock.offset += 20 * 60
    node.client._renewed -= 60  # it asks at most every few seconds
    await node.client.gateways()
    assert await node.client.token() != first


async def test_a_revoked_machine_gets_no_new_token(hub: RunningHub) -> None:
    node = await hub.machine(Role.NODE)
    admin = await hub.machine(Role.ADMIN)
    await admin.client.revoke_node(node.node_id)
    assert (await renew(hub, renewal(hub, node))) == (403, "revoked")
    with pytest.raises(HubRefusedError) as refused:
        await node.client.gateways()
    assert refused.value.is_final


async def test_a_token_signed_by_another_hub_opens_nothing(hub: RunningHub) -> None:
    node = await hub.machine(Role.NODE)
    head, _, signature = node.token.rpartition(".")
    forged = f"{head}.{signature[:-4]}AAAA"
    refused = await hub.http.get("/v1/gateways", headers={"Authorization": f"Bearer {forged}"})
    assert (refused.status_code, code(refused)) == (401, "invalid_token")


async def test_calls_without_a_token_are_limited_by_address(tmp_path: Path) -> None:
    slow = RateLimit(tries=3, seconds_per_try=60)
    async with running_hub(tmp_path / "hub", None, open_calls=slow) as hub:
        answers = [await hub.http.post("/v1/tokens", json={}) for _ in range(4)]
        assert [one.status_code for one in answers] == [422, 422, 422, 429]
        assert int(answers[-1].headers["Retry-After"]) >= 1
        behind_proxy = {"X-Forwarded-For": "198.51.100.7"}
        other = await hub.http.post("/v1/tokens", json={}, headers=behind_proxy)
        assert other.status_code == 422
        assert (await hub.http.get("/v1/health")).status_code == 200


def renewal(hub: RunningHub, node: Machine) -> RenewRequest:
    return renew_request(
        node.keys.signing,
        hub_id=hub.hub.identity.hub_id,
        node_id=node.node_id,
        time=hub.clock(),
        nonce=nonce(),
    )


async def renew(hub: RunningHub, body: RenewRequest) -> tuple[int, str | None]:
    response = await hub.http.post("/v1/tokens", json=body.model_dump(mode="json"))
    return response.status_code, response.json().get("code")
