"""``linkcpp gateway``: a relay between machines that both only dial out, until Ctrl-C."""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from typing import Annotated

import typer

from linkcpp.cli.join_token import credentials_of, own_identity
from linkcpp.cli.output import console, status_console
from linkcpp.cli.own_command import print_own_unit
from linkcpp.cli.verb import verb
from linkcpp.cluster.config import node_url
from linkcpp.cluster.identity import Identity
from linkcpp.common.descriptors import raise_descriptor_limit
from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_once
from linkcpp.common.installation import needing_extra
from linkcpp.common.logs import log_as_json
from linkcpp.common.paths import data_folder
from linkcpp.common.sockets import listen
from linkcpp.gateway.registration import stay_registered
from linkcpp.gateway.relay import Relay
from linkcpp.gateway.server import serve_gateway
from linkcpp.registry.client import joined_client
from linkcpp.registry.credentials import HubCredentials
from linkcpp.registry.fields import MAX_EDGES_PER_GATEWAY
from linkcpp.registry.records import Role
from linkcpp.registry.relay import RELAY_PATH
from linkcpp.registry.secret_file import SECRET_MODE, read_secret
from linkcpp.registry.trust import check_hub_url, is_protected, may_relay, websocket_url

app = verb()

DEFAULT_GATEWAY_PORT = 8721
# Two sockets for each edge, and what the program itself needs.
_DESCRIPTORS = 2 * MAX_EDGES_PER_GATEWAY + 256


@app.command()
def gateway(
    *,
    hub: Annotated[str, typer.Option(help="The hub, such as https://hub.example.")],
    token: Annotated[
        str | None,
        typer.Option(
            help="A join token for gateways: - asks for it, @FILE reads it, or the token itself; "
            "also LINKCPP_JOIN_TOKEN. Not needed again later."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="The address by which machines reach this gateway, such as https://gw.example; "
            "needed unless the hub is on this machine too."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = DEFAULT_GATEWAY_PORT,
    name: Annotated[
        str | None, typer.Option(help="Name to show; default: the earlier one, or the host name.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Allow addresses without TLS. Not safe.")
    ] = False,
    unit: Annotated[
        bool, typer.Option("--systemd-unit", help="Print a systemd unit that runs this, and end.")
    ] = False,
) -> None:
    """Relay between machines of a hub that can only dial out; it cannot read what it carries.

    It listens on loopback, for a proxy with a certificate in front of it; docs/operations.md shows
    one. The log is on stderr, one JSON object a line.
    """
    # Before a join token is used up.
    with needing_extra("gateway", "hub"):
        import uvloop  # noqa: PLC0415

    identity = own_identity(name, hub)
    credentials = credentials_of(hub, token, identity, roles=(Role.GATEWAY,), plain=plain)
    _check_role(credentials)
    if unit:
        print_own_unit("gateway", "linkcpp gateway of a hub")
        return
    log_as_json()
    _see_descriptors()
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(opened) for opened in listen(host, port)]
        own = node_url(host, sockets[0].getsockname()[1])
        public = websocket_url(_public_url(url, own, credentials, plain=plain), RELAY_PATH)
        uvloop.run(_run(credentials, identity, sockets, public))


async def _run(
    credentials: HubCredentials,
    identity: Identity,
    sockets: list[socket.socket],
    public: str,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    metrics_token = _metrics_token()
    async with joined_client(credentials.url, identity=identity) as client:
        relay = Relay(
            gateway_id=identity.node_id, hub=credentials.hub_key, clock=client.ticket_time
        )
        registering = asyncio.create_task(stay_registered(relay, client, public))
        registering.add_done_callback(lambda _: stop.set())
        out = console()
        out.print(f"{public} relays for {credentials.url}", soft_wrap=True)
        out.print("  Ctrl-C stops it.")
        try:
            await serve_gateway(relay, metrics_token, sockets, stop)
        finally:
            registering.cancel()
            (ended,) = await asyncio.gather(registering, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended
    status_console().print("stopped; edges go on over another gateway, where the hub has one")


def _check_role(credentials: HubCredentials) -> None:
    if credentials.node_token.role is not Role.GATEWAY:
        raise LinkcppError(
            f"This machine joined {credentials.url} as {credentials.node_token.role.value}.",
            hint="A gateway needs a machine id of its own: set LINKCPP_HOME to another folder, and "
            "give a token of `linkcpp hub token create --role gateway`.",
        )


def _public_url(url: str | None, own: str, credentials: HubCredentials, *, plain: bool) -> str:
    if url is not None:
        public = check_hub_url(url, allow_plain=plain)
        if not may_relay(public, credentials.url):
            raise LinkcppError(
                f"No machine of {credentials.url} would dial {public}: a gateway needs TLS where "
                "its hub has it.",
                hint="Put a proxy with a certificate in front of it, and give its https:// "
                "address with --url.",
            )
        return public
    if is_protected(own) and is_protected(credentials.url) and credentials.url.startswith("http:"):
        return own
    raise LinkcppError(
        "Nobody would know how to reach this gateway.",
        hint="Name the address of the TLS proxy in front of it: --url https://gw.example.",
    )


def _metrics_token() -> str:
    path = data_folder() / "gateway" / "metrics-token"
    write_once(path, secrets.token_urlsafe(32) + "\n", mode=SECRET_MODE)
    return read_secret(path, "the token for metrics").strip()


def _see_descriptors() -> None:
    most = raise_descriptor_limit(_DESCRIPTORS)
    if most < _DESCRIPTORS:
        logging.getLogger(__name__).warning(
            "the system lets this process have %d sockets, enough for %d edges", most, most // 2
        )
