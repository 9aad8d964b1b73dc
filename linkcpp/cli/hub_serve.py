"""``linkcpp hub`` itself: the hub until Ctrl-C, and what it tells people when it begins."""

import asyncio
import contextlib
import signal
import socket
from pathlib import Path

import uvloop

from linkcpp.cli.hub_access import data_folder_of, note_address, only_hub
from linkcpp.cli.output import console, status_console
from linkcpp.cluster.config import node_url
from linkcpp.common.http_server import BoundedHttpProtocol
from linkcpp.common.logs import log_as_json
from linkcpp.common.sockets import listen
from linkcpp.common.text import shell_command
from linkcpp.hub.app import create_app
from linkcpp.hub.server import embedded_gateway, serve_hub, tune_collector
from linkcpp.hub.service import open_hub


def serve(folder: Path, database: str | None, host: str, port: int, *, with_gateway: bool) -> None:
    """Serve the hub of a data folder until a signal ends it.

    Raises:
        LinkcppError: the port is taken, or its database or secrets cannot be used.
    """
    log_as_json()
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_hub(folder))
        sockets = [stack.enter_context(opened) for opened in listen(host, port)]
        uvloop.run(_serve(folder, database, sockets, host, with_gateway=with_gateway))


async def _serve(
    folder: Path,
    database: str | None,
    sockets: list[socket.socket],
    host: str,
    *,
    with_gateway: bool,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    url = node_url(host, sockets[0].getsockname()[1])
    async with await open_hub(folder, database) as opened, contextlib.AsyncExitStack() as stack:
        token_file = await opened.make_first_token()
        http = BoundedHttpProtocol
        if with_gateway:
            http = await stack.enter_async_context(embedded_gateway(opened))
        note_address(folder, url)
        tune_collector()
        await serve_hub(
            opened,
            create_app(opened),
            sockets,
            stop,
            http=http,
            on_ready=lambda: _announce(url, folder, token_file, with_gateway=with_gateway),
        )
    status_console().print("stopped; machines come back by themselves when it runs again")


def _announce(url: str, folder: Path, token_file: Path | None, *, with_gateway: bool) -> None:
    out = console()
    what = "a hub and gateway" if with_gateway else "a hub"
    out.print(f"{url} is {what}; its data is in {folder}", soft_wrap=True)
    if token_file is not None:
        out.print(
            f"  a join token for the first admin is in {token_file}; on this machine none is "
            "needed",
            soft_wrap=True,
        )
    data = ("--data", folder) if folder != data_folder_of(None) else ()
    command = shell_command("linkcpp", "hub", "token", "create", *data)
    out.print(f"  {command}    lets a machine in", soft_wrap=True)
    out.print("  Ctrl-C stops it.")
