"""A model behind HTTP: only the ranges that are asked for cross the network."""

import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator

import httpx
from pydantic import ValidationError

from linkcpp.common.closing import Closing
from linkcpp.common.errors import LinkcppError
from linkcpp.common.network_errors import in_words
from linkcpp.common.records import ErrorBody
from linkcpp.common.text import printable
from linkcpp.model.source import check_range
from linkcpp.model.web_client import MAXIMUM_REDIRECTS, new_client

TOKEN_VARIABLE = "LINKCPP_MODEL_TOKEN"  # noqa: S105 - the name of a variable, not a token
HUGGING_FACE_HOST = "huggingface.co"
# A server that drips bytes keeps resetting the read timeout; this is the pace it must hold.
PATIENCE_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 50_000
# Waited before trying again, as long as nothing arrives in between.
RETRY_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
# A hub is waited for while it is started again.
HUB_RETRY_PAUSES_SECONDS = (*RETRY_PAUSES_SECONDS, *(10.0,) * 10)
# A server that says when to come again is asked for so long, as nothing is wrong with it.
BUSY_PATIENCE_SECONDS = 1800.0
_MAX_PAUSE_SECONDS = 30.0
_MAX_ERROR_BYTES = 4096
_PASSING_STATUS = (429, 500, 502, 503, 504)
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class _PassingError(LinkcppError):
    """A failure that may be gone at the next attempt."""


class _BusyError(_PassingError):
    """The server said how many seconds later to come again."""

    def __init__(self, name: str, pause_seconds: float) -> None:
        super().__init__(f"The server of {name} is busy.", hint="Try again later.")
        self.pause_seconds = min(pause_seconds, _MAX_PAUSE_SECONDS)


class WebSource(Closing):
    """A file on a web server that honours ``Range`` requests (RFC 9110, section 14).

    A bearer token is taken from ``LINKCPP_MODEL_TOKEN`` (for Hugging Face also ``HF_TOKEN``) and
    sent over TLS or loopback only, never to another host that a redirect names. A hub's files come
    with ``bearer``, which is asked for the token of the day before each request. Where
    ``size_bytes`` is known, nothing is asked before the first bytes are wanted.
    """

    def __init__(
        self,
        url: str,
        *,
        client: httpx.Client | None = None,
        bearer: Callable[[], str] | None = None,
        size_bytes: int | None = None,
    ) -> None:
        try:
            self._url = httpx.URL(url)
            reason = "" if self._url.host else "it names no host"
        except (httpx.InvalidURL, ValueError) as error:
            reason = str(error).rstrip(".")
        if reason:
            raise LinkcppError(
                f"{url!r} is not a usable address: {reason}.", hint="Copy it from your browser."
            )
        self.name = public_url(url)
        self.bytes_read = 0
        self._bearer = bearer
        self._etag: str | None = None
        self._counting = threading.Lock()
        self._owns_client = client is None
        self._client = client or new_client()
        try:
            self.size_bytes = self._ask_for_size() if size_bytes is None else size_bytes
        except BaseException:
            self.close()
            raise

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly ``length_bytes`` from ``offset_bytes`` on; see ``ByteSource.read``."""
        check_range(self, offset_bytes, length_bytes)
        if length_bytes == 0:
            return b""
        return b"".join(self._pieces(offset_bytes, length_bytes))

    def stream(self, offset_bytes: int, length_bytes: int) -> Iterator[memoryview]:
        """The same bytes in pieces; see ``ByteSource.stream``.

        Goes on where a dropped connection or a busy server left off.
        """
        check_range(self, offset_bytes, length_bytes)
        return self._steadily(offset_bytes, length_bytes)

    def _steadily(self, offset_bytes: int, length_bytes: int) -> Iterator[memoryview]:
        deadline = _deadline(length_bytes)
        busy_until = time.monotonic() + BUSY_PATIENCE_SECONDS
        done = failures = 0
        while done < length_bytes:
            try:
                for piece in self._pieces(offset_bytes + done, length_bytes - done):
                    done += len(piece)
                    failures = 0
                    yield memoryview(piece)
            except _BusyError as error:
                if time.monotonic() > busy_until:
                    raise
                deadline += error.pause_seconds
                # Not all who were sent away at once should come again at once.
                time.sleep(error.pause_seconds * random.uniform(0.5, 1.5))  # noqa: S311
            except _PassingError:
                pauses = HUB_RETRY_PAUSES_SECONDS if self._bearer else RETRY_PAUSES_SECONDS
                if failures == len(pauses) or time.monotonic() > deadline:
                    raise
                time.sleep(pauses[failures])
                failures += 1

    def close(self) -> None:
        """Close the connection, unless the client is somebody else's; may be called twice."""
        if self._owns_client:
            self._client.close()

    @property
    def version(self) -> str:
        """The entity tag or date, which the server changes with the bytes, if it gives any."""
        return f"{self.size_bytes} bytes of {self._etag}"

    def _ask_for_size(self) -> int:
        self.size_bytes = -1
        # A hub is known to be there; another address may just have been mistyped.
        for _ in self._steadily(0, 1) if self._bearer else self._pieces(0, 1):
            pass
        return self.size_bytes

    def _pieces(self, offset: int, length: int) -> Iterator[bytes]:
        """What one request gives, exactly ``length`` bytes unless it raises."""
        headers = {
            "Range": f"bytes={offset}-{offset + length - 1}",
            # A compressed answer would count and cut other bytes than the file's.
            "Accept-Encoding": "identity",
            **self._authorization(),
        }
        deadline = _deadline(length)
        left = length
        try:
            with self._client.stream("GET", self._url, headers=headers) as response:
                self._check(response, offset, length)
                for piece in response.iter_raw():
                    left -= len(piece)
                    # A server that sends more than was asked must not fill our memory.
                    if left < 0:
                        raise self._refused("sent more bytes than were asked for")
                    if time.monotonic() > deadline:
                        raise self._refused("sends too slowly")
                    with self._counting:
                        self.bytes_read += len(piece)
                    yield piece
        except httpx.TooManyRedirects as error:
            raise self._refused(f"redirects more than {MAXIMUM_REDIRECTS} times") from error
        except UnicodeError as error:
            # Of the address itself, or of one that the server redirects to.
            raise LinkcppError(
                f"Cannot read {self.name}: a host name in its address cannot be: {error}.",
                hint="Check the address.",
            ) from error
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise _PassingError(
                f"Cannot read {self.name}: {in_words(error)}.",
                hint="Check the address and the network; is the server up?",
            ) from error
        if left:
            raise _PassingError(
                f"The server of {self.name} sent {length - left} bytes where {length} were "
                "promised.",
                hint="Download the file and give its path.",
            )

    def _check(self, response: httpx.Response, offset: int, length: int) -> None:
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            pause = response.headers.get("Retry-After", "")
            if response.status_code in _PASSING_STATUS and re.fullmatch("[0-9]{1,9}", pause):
                raise _BusyError(self.name, float(pause))
            if self._bearer is not None:
                raise self._hub_error(response)
            raise self._status_error(response)
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None:
            raise self._refused("does not tell the size of the file in Content-Range")
        first, last, total = (int(number) for number in match.groups())
        if (first, last) != (offset, offset + length - 1):
            raise self._refused("answers with another range than was asked for")
        etag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if self._etag is not None and etag != self._etag:
            raise self._changed()
        self._etag = etag
        if self.size_bytes < 0:
            self.size_bytes = total
        elif total != self.size_bytes:
            raise self._changed()

    def _authorization(self) -> dict[str, str]:
        if self._bearer is not None:
            try:
                return {"Authorization": f"Bearer {self._bearer()}"}
            except LinkcppError as error:
                # A hub that does not answer gives no token either, for now.
                raise _PassingError(error.message, hint=error.hint) from error
        token = os.environ.get(TOKEN_VARIABLE)
        if not token and self._url.host == HUGGING_FACE_HOST:
            token = os.environ.get("HF_TOKEN")
        if not token or not (self._url.scheme == "https" or self._url.host in _LOOPBACK_HOSTS):
            return {}
        return {"Authorization": f"Bearer {token}"}

    def _status_error(self, response: httpx.Response) -> LinkcppError:
        status = response.status_code
        if status == httpx.codes.OK:
            return LinkcppError(
                f"The server of {self.name} does not serve ranges (HTTP Range), "
                "so the header cannot be read without the whole file.",
                hint="Download the file and give its path, or use a server that serves ranges.",
            )
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            return LinkcppError(
                f"The server refuses {self.name} without the right token (HTTP {status}).",
                hint=f"Set {TOKEN_VARIABLE} (or HF_TOKEN for {HUGGING_FACE_HOST}) and "
                "accept the model's terms on its page.",
            )
        if status in (httpx.codes.NOT_FOUND, httpx.codes.GONE):
            return LinkcppError(
                f"There is no file at {self.name} (HTTP {status}).",
                hint="Check the address. On Hugging Face it has /resolve/main/ before the name.",
            )
        if status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return LinkcppError(f"{self.name} is empty.", hint="Check the address.")
        kind = _PassingError if status in _PASSING_STATUS else LinkcppError
        return kind(f"The server of {self.name} answers HTTP {status}.", hint="Try again later.")

    def _hub_error(self, response: httpx.Response) -> LinkcppError:
        """Repeat what a hub says; a token that it does not take is renewed before the next try."""
        status = response.status_code
        body = bytearray()
        for piece in response.iter_raw():
            body += piece
            if len(body) > _MAX_ERROR_BYTES:
                break
        message, hint = f"The server of {self.name} answers HTTP {status}.", None
        with contextlib.suppress(ValidationError):
            told = ErrorBody.model_validate_json(bytes(body))
            message = f"{self.name}: {printable(told.message, 500)}"
            hint = printable(told.hint, 500) if told.hint else None
        is_passing = status in (*_PASSING_STATUS, httpx.codes.UNAUTHORIZED)
        return (_PassingError if is_passing else LinkcppError)(message, hint=hint)

    def _refused(self, what: str) -> LinkcppError:
        return LinkcppError(
            f"The server of {self.name} {what}.", hint="Download the file and give its path."
        )

    def _changed(self) -> LinkcppError:
        return LinkcppError(f"{self.name} changed while it was read.", hint="Try again.")


def public_url(url: str) -> str:
    """An address without what it may hold of secrets."""
    return str(httpx.URL(url).copy_with(userinfo=b"", query=None, fragment=None))


def _deadline(length_bytes: int) -> float:
    return time.monotonic() + PATIENCE_SECONDS + length_bytes / SLOWEST_BYTES_PER_SECOND
