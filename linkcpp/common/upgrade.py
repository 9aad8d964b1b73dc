"""The HTTP request that becomes a WebSocket (RFC 6455, section 4.2). Pure."""

import base64
import binascii
import hashlib
from typing import Final

from linkcpp.common.callers import Headers

_VERSION: Final = b"13"
_ACCEPT_SUFFIX: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class UpgradeError(Exception):
    """The request does not become a WebSocket: HTTP status, a stable code, and the reason."""

    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.code = code
        self.reason = reason


def upgrade_response(method: bytes, headers: Headers) -> bytes:
    """Return the answer that makes the connection a WebSocket, without extensions.

    ``headers`` have names in small letters; that they ask for ``websocket`` is known already.

    Raises:
        UpgradeError: a part is missing or of another version.
    """
    found = dict(headers)
    if method != b"GET":
        raise UpgradeError(405, "not_get", "A WebSocket begins with GET.")
    if found.get(b"sec-websocket-version") != _VERSION:
        raise UpgradeError(426, "other_version", "Only version 13 of WebSockets is spoken here.")
    key = found.get(b"sec-websocket-key", b"").strip()
    try:
        is_key = len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        is_key = False
    if not is_key:
        raise UpgradeError(400, "bad_key", "Sec-WebSocket-Key is not 16 bytes in base64.")
    digest = hashlib.sha1(key + _ACCEPT_SUFFIX, usedforsecurity=False).digest()
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + base64.b64encode(digest) + b"\r\n\r\n"
    )


def request_head(method: bytes, headers: Headers) -> bytes:
    """Write the head of a request again, for whoever answers it in another process."""
    lines = [method + b" / HTTP/1.1", *(name + b": " + value for name, value in headers)]
    return b"\r\n".join([*lines, b"", b""])
