"""What went wrong on the network, in words for people: no name of an exception, no errno. Pure."""

import errno
import socket
import ssl
from collections.abc import Iterator

import httpx
from websockets.exceptions import InvalidProxyStatus, InvalidStatus

from linkcpp.common.text import printable

_MAX_REASON_CHARACTERS = 300
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_CLOSED = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, EOFError)
_WORDS: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((TimeoutError, httpx.TimeoutException), "no answer in time"),
    ((socket.gaierror,), "its name cannot be looked up"),
    ((ConnectionRefusedError,), "nothing listens there, or a firewall is in the way"),
    ((ssl.SSLError,), "it does not speak TLS as it should"),
    ((*_CLOSED, httpx.ReadError, httpx.WriteError), "it closed the connection"),
    ((httpx.RemoteProtocolError,), "it closed the connection or does not speak HTTP"),
)


def in_words(error: BaseException) -> str:
    """Say why a call failed, as the end of a sentence without its full stop.

    ``error`` is httpx's, websockets' or the system's. What was noted on it comes after that, such
    as the proxy that was used.
    """
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return printable(f"{_reason(error)}{notes}", _MAX_REASON_CHARACTERS)


def _reason(error: BaseException) -> str:
    causes = list(_causes(error))
    for cause in causes:
        if words := _reason_of(cause):
            return words
    return str(error).strip().partition("\n")[0].rstrip(".") or "the connection failed"


def _reason_of(cause: BaseException) -> str | None:
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}"
    if isinstance(cause, InvalidProxyStatus):
        return f"the proxy answers with HTTP status {cause.response.status_code}"
    if isinstance(cause, InvalidStatus | httpx.HTTPStatusError):
        return f"it answers with HTTP status {cause.response.status_code}"
    if isinstance(cause, OSError) and cause.errno in _NO_WAY:
        return "the network has no way there"
    return next((words for kinds, words in _WORDS if isinstance(cause, kinds)), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came from, the innermost first: that tells most."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting and len(found) < 32:
        one = waiting.pop(0)
        if one is None or one in found:
            continue
        found.append(one)
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        # httpcore keeps what it translates there, and cuts the chain.
        waiting += [each for each in one.args if isinstance(each, BaseException)]
        waiting += [one.__cause__, None if one.__suppress_context__ else one.__context__]
    return reversed(found)
