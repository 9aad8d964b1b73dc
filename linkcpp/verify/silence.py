"""A program that stopped answering, told of in words."""

import httpx

from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable


class SilentError(LinkcppError):
    """A program that was asked does not answer any more."""


def silent(who: str, error: httpx.HTTPError, way_out: str | None = None) -> SilentError:
    """Say in words why there was no answer. Pure."""
    return SilentError(f"{who} stopped answering: {_reason(error)}.", hint=way_out)


def _reason(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer came in time"
    if isinstance(error, httpx.ConnectError):
        return "it takes no connection"
    if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
        return "it closed the connection in the middle of a request"
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP status {error.response.status_code}"
    return printable(str(error) or type(error).__name__, 200)
