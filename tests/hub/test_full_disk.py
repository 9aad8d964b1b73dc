"""What takes rights away holds at once, also where the hub's database cannot be written to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from linkcpp.common.errors import LinkcppError
from linkcpp.hub.database import open_database
from linkcpp.hub.identity import load_hub_identity
from linkcpp.registry.connection import HubRefusedError, HubUnreachableError
from linkcpp.registry.edges import EdgeRequest, GatewayHeartbeat
from linkcpp.registry.records import Role
from tests.hub.hubs import RunningHub, running_hub


def make_full(hub: RunningHub) -> Callable[[], None]:
    """Let no transaction be committed from now on, until what is returned is called."""
    engine = hub.hub._engine
    if engine.dialect.name == "sqlite":
        max_pages = 1  # SQLite takes it as: no larger than it is

        @event.listens_for(engine, "checkout")
        def limit(connection: Any, *_: object) -> None:
            connection.execute(f"PRAGMA max_page_count = {max_pages}")

        def fill(connection: Any, *_: object) -> None:
            if max_pages == 1:
                connection.exec_driver_sql("CREATE TABLE filler (x)")
                connection.exec_driver_sql("INSERT INTO filler VALUES (zeroblob(1000000))")

        event.listen(engine, "commit", fill)

        def end() -> None:
            nonlocal max_pages
            max_pages = 1_000_000

    else:

        def refuse(connection: Any, *_: object) -> None:
            if not is_over:
                connection.exec_driver_sql("SELECT no_room()")

        is_over = False
        event.listen(engine, "commit", refuse)

        def end() -> None:
            nonlocal is_over
            is_over = True

    return end


async def test_a_revocation_holds_at_once_and_is_written_when_the_disk_has_room_again(
    tmp_path: Path, database_url: str | None
) -> None:
    async with running_hub(tmp_path / "hub", database_url) as hub:
        admin, node = await hub.machine(Role.ADMIN), await hub.online_node()
        coordinator = await hub.machine(Role.BACKBONE, name="desk")
        gateway = await hub.online_gateway()
        edge = await coordinator.client.create_edge(EdgeRequest(node_id=node.node_id))
        has_room_again = make_full(hub)

        remark = await admin.client.revoke_node(node.node_id)
        assert remark is not None
        assert "not written yet" in remark
        with pytest.raises(HubRefusedError, match="revoked"):
            await node.client.leave()
        listed = (await coordinator.client.nodes()).nodes
        assert [one.is_revoked for one in listed if one.node_id == node.node_id] == [True]
        assert (await admin.client.edges()).edges == ()
        # The relay learns of it too, though that it was there cannot be noted.
        beat = GatewayHeartbeat(url="wss://relay.example/v1/relay", edges=(edge.edge_id,))
        assert (await gateway.client.gateway_heartbeat(beat)).close_edges == (edge.edge_id,)

        has_room_again()
        await hub.hub.writer.write(lambda _: None)
    async with running_hub(tmp_path / "hub", database_url) as again:
        assert again.hub.directory.is_revoked(node.node_id)
        assert again.hub.directory.edges == {}


async def test_a_revoked_join_token_lets_nobody_in_between(
    tmp_path: Path, database_url: str | None
) -> None:
    async with running_hub(tmp_path / "hub", database_url) as hub:
        admin = await hub.machine(Role.ADMIN)
        secret = await hub.join_token(uses=2)
        token_id = (await admin.client.join_tokens()).tokens[0].token_id
        has_room_again = make_full(hub)
        assert await admin.client.revoke_join_token(token_id)
        tokens = (await admin.client.join_tokens()).tokens
        assert [one.is_revoked for one in tokens if one.token_id == token_id] == [True]
        assert (await hub.join(hub.join_body(secret))).status_code == 503
        has_room_again()
        refused = await hub.join(hub.join_body(secret))
        assert refused.status_code == 401
        assert refused.json()["code"] == "revoked_token"


async def test_an_edge_ends_at_once_and_a_node_that_leaves_is_gone_though_the_disk_is_full(
    hub: RunningHub,
) -> None:
    node, coordinator = await hub.online_node(), await hub.machine(Role.BACKBONE, name="desk")
    admin = await hub.machine(Role.ADMIN)
    edge = await coordinator.client.create_edge(EdgeRequest(node_id=node.node_id))
    has_room_again = make_full(hub)
    await coordinator.client.close_edge(edge.edge_id)
    assert (await admin.client.edges()).edges == ()
    with pytest.raises(HubUnreachableError):
        await node.client.leave()
    with pytest.raises(HubRefusedError, match="was stopped"):
        await coordinator.client.create_edge(EdgeRequest(node_id=node.node_id))
    has_room_again()


async def test_what_could_never_be_written_is_said_when_the_hub_stops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_hub(tmp_path / "hub", None) as hub:
        admin, node = await hub.machine(Role.ADMIN), await hub.machine(Role.NODE)
        make_full(hub)
        await admin.client.revoke_node(node.node_id)
    assert "could not be written and are forgotten: revoke again" in caplog.text


def test_an_empty_database_of_a_hub_that_has_served_is_not_taken_for_a_new_hub(
    tmp_path: Path, database_url: str | None
) -> None:
    open_database(database_url, tmp_path).dispose()
    load_hub_identity(tmp_path, create=True)
    engine = open_database(database_url, tmp_path)
    if database_url is None:
        engine.dispose()
        for path in tmp_path.glob("hub.sqlite3*"):
            path.unlink()
        (tmp_path / "hub.sqlite3").touch()
    else:
        with engine.begin() as connection:
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        engine.dispose()
    with pytest.raises(LinkcppError, match="empty, but the hub of") as refused:
        open_database(database_url, tmp_path)
    assert "from a backup" in (refused.value.hint or "")


def test_a_damaged_database_is_not_said_to_be_a_server_that_is_down(tmp_path: Path) -> None:
    open_database(None, tmp_path).dispose()
    (tmp_path / "hub.sqlite3").write_bytes(b"nonsense" * 1000)
    with pytest.raises(LinkcppError, match="cannot be used") as refused:
        open_database(None, tmp_path)
    assert "backup" in (refused.value.hint or "")
