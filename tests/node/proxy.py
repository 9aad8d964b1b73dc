"""A proxy for HTTP CONNECT in a process of its own: the only way to a hub, whose name none has.

Run as a program: ``proxy.py HUB_PORT CERTIFICATE_FOLDER``. It prints its port, and then a line for
each connection that it makes. What comes through is TLS for ``hub.invalid``, and ends here.
"""

import asyncio
import contextlib
import ssl
import sys
from pathlib import Path


async def main(hub_port: int, certificates: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "fullchain.pem", certificates / "privkey.pem")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.split(b" ", 2)
            if (method, target) != (b"CONNECT", b"hub.invalid:443"):
                writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
                writer.close()
                return
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await writer.drain()
            await writer.start_tls(tls)
            back, forth = await asyncio.open_connection("127.0.0.1", hub_port)
            print(target.decode(), flush=True)
            await asyncio.gather(pass_on(reader, forth), pass_on(back, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.sleep(3600)


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
