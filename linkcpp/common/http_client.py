"""Calls to linkcpp's own services, from the client's side: bounded answers, errors in words."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx
from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.network_errors import in_words
from linkcpp.common.records import ErrorBody, Record
from linkcpp.common.text import printable

_MAX_SHOWN_CHARACTERS = 500
# What proxies answer themselves where nothing behind them does.
PROXY_STATUSES = (502, 503, 504)


class ServiceError(LinkcppError):
    """A call to a service failed; ``code`` is that of ``ErrorBody`` where the service answered.

    ``told`` is what the service said, without its address.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, code: str, told: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.told = told or message


_E = TypeVar("_E", bound=ServiceError)
_R = TypeVar("_R", bound=Record)


@dataclass(frozen=True, slots=True)
class RemoteService(Generic[_E]):
    """A service as people are told of it: its kind, such as ``hub``, and where it is.

    Where it does not answer, or is something else, an ``unreachable_error`` is made; ``hint``
    says what to look at then.
    """

    kind: str
    url: str
    hint: str
    unreachable_error: type[_E]

    def unreachable(self, error: Exception) -> _E:
        """Say in words that there was no answer."""
        return self.unreachable_error(
            f"The {self.kind} at {self.url} cannot be reached: {in_words(error)}.",
            hint=self.hint,
            code="unreachable",
        )

    def told(self, status: int, body: bytes) -> ErrorBody:
        """Return what the service answered in place of what was asked for, fit for a terminal.

        Raises:
            ServiceError: ``unreachable_error``: such an answer no service of linkcpp gives.
        """
        try:
            told = ErrorBody.model_validate_json(body)
        except ValidationError:
            if status in PROXY_STATUSES:
                raise self.unreachable_error(
                    f"The {self.kind} at {self.url} cannot be reached: a proxy on the way answers "
                    f"with HTTP status {status}, as it does while the {self.kind} is down.",
                    hint=self.hint,
                    code="unreachable",
                ) from None
            raise self.unreachable_error(
                f"What answers at {self.url} is not a linkcpp {self.kind} (HTTP status {status}).",
                hint=self.hint,
                code=f"not_a_{self.kind}",
            ) from None
        return ErrorBody(
            code=told.code,
            message=printable(told.message, _MAX_SHOWN_CHARACTERS),
            hint=printable(told.hint, _MAX_SHOWN_CHARACTERS) if told.hint else None,
        )

    def parse(self, record: type[_R], content: bytes) -> _R:
        """Read an answer.

        Raises:
            ServiceError: ``unreachable_error``: it is something else, or of another version.
        """
        try:
            return record.model_validate_json(content)
        except ValidationError as error:
            raise self.unreachable_error(
                f"What answers at {self.url} is not a linkcpp {self.kind}, or one of another "
                "version.",
                hint="Check the address and the port first: another service may listen there. If "
                "they are right, install the same version of linkcpp on both machines.",
                code=f"not_a_{self.kind}",
            ) from error


class AnswerTooLongError(httpx.RemoteProtocolError):
    """An answer has more bytes than any that is wanted."""


async def read_bounded(response: httpx.Response, max_bytes: int) -> bytes:
    """Read a whole answer that was begun as a stream.

    Raises:
        httpx.HTTPError: it breaks off, or is longer than ``max_bytes``.
    """
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > max_bytes:
            raise AnswerTooLongError("the answer is too long")
    return bytes(body)
