"""Ids of requests: one goes along from machine to machine, into the logs of all of them.

Who serves a request calls ``begin_request``; log lines and calls to other machines that follow from
it have its id then, also those of tasks and threads that asyncio starts for it.
"""

import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final

REQUEST_ID_HEADER: Final = "X-Request-ID"

_RAW_HEADER: Final = REQUEST_ID_HEADER.lower().encode()
# What UUIDs, trace ids and the ids of usual proxies are made of, and nothing that could forge a
# line of a log or fill it.
_FITTING: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,64}")
_NEW_ID_BYTES: Final = 8

_current: ContextVar[str | None] = ContextVar("request_id", default=None)


def choose_request_id(headers: Iterable[tuple[bytes, bytes]] = ()) -> str:
    """Return the id that a caller sent, or a new one where there is none that fits.

    ``headers`` have names in small letters.
    """
    sent = [value for name, value in headers if name == _RAW_HEADER]
    if len(sent) == 1 and _FITTING.fullmatch(sent[0]):
        return sent[0].decode("ascii")
    return secrets.token_hex(_NEW_ID_BYTES)


def begin_request(headers: Iterable[tuple[bytes, bytes]] = ()) -> str:
    """Choose the id of a request, and serve it from here on."""
    request_id = choose_request_id(headers)
    _current.set(request_id)
    return request_id


def continue_request(request_id: str | None) -> None:
    """Go on with a request whose id was chosen before, also in another program."""
    _current.set(request_id)


def current_request_id() -> str | None:
    """Return the id of the request that this code runs for, ``None`` outside of any."""
    return _current.get()


def request_id_headers() -> dict[str, str]:
    """Return the header that passes the current id on; nothing outside of any request."""
    request_id = _current.get()
    return {} if request_id is None else {REQUEST_ID_HEADER: request_id}
