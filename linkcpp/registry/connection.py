"""Calls to a hub: deadlines, bounded answers, no redirects, errors in words, a token kept fresh."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from time import monotonic, time
from typing import Any, TypeVar

import httpx

from linkcpp.common.closing import AsyncClosing
from linkcpp.common.http_client import RemoteService, ServiceError, read_bounded
from linkcpp.common.proxies import ProxiedAsyncTransport, Proxy
from linkcpp.common.records import WireRecord
from linkcpp.common.request_ids import request_id_headers
from linkcpp.registry.records import HubHealth, NodeToken
from linkcpp.registry.trust import check_hub_url, tls_context

_MAX_ANSWER_BYTES = 64 * 2**20
_RENEW_BEFORE_SECONDS = 120.0
_MIN_SECONDS_BETWEEN_RENEWALS = 5.0
_HINT_REACH = "See that `linkcpp hub` runs there and that this machine can reach it."

_R = TypeVar("_R", bound=WireRecord)


class HubError(ServiceError):
    """A call to a hub failed."""


class HubUnreachableError(HubError):
    """The hub did not answer, or what answered is not a hub: worth another try later."""


class HubRefusedError(HubError):
    """The hub answered with a reason why not; ``status`` is the HTTP status."""

    def __init__(self, message: str, *, hint: str | None = None, code: str, status: int) -> None:
        super().__init__(message, hint=hint, code=code)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Whether the machine was revoked or never joined, so that trying again is of no use."""
        return self.code in ("revoked", "unknown_machine")

    @property
    def is_about_time(self) -> bool:
        """Whether the hub's clock was set while a proof was on its way: the next one is taken."""
        return self.code in ("proof_used", "proof_out_of_time")


# Asks for a new token, given what the hub told of itself; ``time`` is the hub's own clock.
Renew = Callable[["HubConnection", HubHealth], Awaitable[NodeToken]]


class HubConnection(AsyncClosing):
    """Calls to one hub, for use as an asynchronous context manager.

    ``renew`` gets a new token when the last one is about to end. A connection without it can make
    only the calls that are open to all. ``hub_id`` is that of the hub that this machine joined,
    empty where it did not join one.
    """

    def __init__(
        self,
        url: str,
        *,
        renew: Renew | None = None,
        hub_id: str = "",
        timeout_seconds: float = 15.0,
        allow_plain: bool = False,
    ) -> None:
        self.url = check_hub_url(url, allow_plain=allow_plain)
        self.hub_id = hub_id
        self.service = RemoteService("hub", self.url, _HINT_REACH, HubUnreachableError)
        self.timeout_seconds = timeout_seconds
        self._renew = renew
        self._token: NodeToken | None = None
        self._token_until = 0.0  # of the monotonic clock: this machine's date may be wrong
        self._renewed = -_MIN_SECONDS_BETWEEN_RENEWALS
        self._renewing = asyncio.Lock()
        # By how much the hub's clock was ahead of the monotonic one when it last answered.
        self._hub_ahead: float | None = None
        # No credentials from the environment: the token is for this hub alone.
        self._http = httpx.AsyncClient(
            timeout=timeout_seconds,
            trust_env=False,
            follow_redirects=False,
            transport=ProxiedAsyncTransport(tls_context()),
            headers={"Accept-Encoding": "identity"},
        )

    def tls(self) -> ssl.SSLContext | None:
        """Return what verifies the hub's certificate; ``None`` where it has none (loopback)."""
        return tls_context() if self.url.startswith("https:") else None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def health(self) -> HubHealth:
        """Ask the hub who it is.

        Raises:
            HubError: nothing answers, or it is not a hub.
        """
        health = await self.call(HubHealth, "GET", "/v1/health", authenticated=False)
        self._hub_ahead = health.time - monotonic()
        return health

    def ticket_time(self) -> float:
        """Return the time by which the hub's tickets end, in seconds since 1970.

        It is the hub's as of its last answer, for this machine's clock may be wrong; or this
        machine's where that is earlier, for the hub's may have been set since.
        """
        own = time()
        return own if self._hub_ahead is None else min(own, monotonic() + self._hub_ahead)

    async def token(self) -> str:
        """Return a token that is valid for a while, a new one where needed.

        Raises:
            HubError: the hub cannot be reached, or gives this machine no token any more.
        """
        async with self._renewing:
            if self._token is None or monotonic() > self._token_until:
                await self._take_new_token()
            assert self._token is not None  # noqa: S101 - taken above
            return self._token.token

    async def _take_new_token(self) -> None:
        if self._renew is None:
            raise HubError(
                "This call needs a token of the hub.",
                hint="`linkcpp join URL --token …` gets one.",
                code="no_token",
            )
        health = await self.health()
        try:
            self._token = await self._renew(self, health)
        except HubRefusedError as error:
            if not error.is_about_time:
                raise
            health = await self.health()
            self._token = await self._renew(self, health)
        left_seconds = self._token.expires_at - health.time
        self._renewed = monotonic()
        self._token_until = self._renewed + max(
            _MIN_SECONDS_BETWEEN_RENEWALS, left_seconds - _RENEW_BEFORE_SECONDS
        )

    async def _drop_token(self, token: str) -> bool:
        """Forget a token that the hub did not take; tell whether another one may be asked for."""
        async with self._renewing:
            if self._token is not None and self._token.token != token:
                return True
            if monotonic() - self._renewed < _MIN_SECONDS_BETWEEN_RENEWALS:
                return False
            self._token = None
            return True

    async def call(
        self,
        answer: type[_R],
        method: str,
        path: str,
        body: WireRecord | None = None,
        *,
        authenticated: bool = True,
    ) -> _R:
        """Make a call that is answered with a record.

        Raises:
            HubError: see its kinds.
        """
        content = await self.exchange(method, path, body, authenticated=authenticated)
        return self.service.parse(answer, content)

    async def exchange(
        self,
        method: str,
        path: str,
        body: WireRecord | None = None,
        *,
        authenticated: bool = True,
    ) -> bytes:
        """Make a call and return what was answered, 64 MiB at most.

        Raises:
            HubError: see its kinds.
        """
        content = body.model_dump_json().encode() if body is not None else None
        try:
            # httpx bounds each read; a hub that drips bytes is bounded here as a whole.
            async with (
                asyncio.timeout(2 * self.timeout_seconds),
                self.stream(method, path, content, authenticated=authenticated) as response,
            ):
                return await read_bounded(response, _MAX_ANSWER_BYTES)
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            raise self.service.unreachable(error) from error

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        authenticated: bool = True,
    ) -> AsyncIterator[httpx.Response]:
        """Make a call whose answer the caller reads; what it then raises is httpx's.

        Raises:
            HubError: the hub cannot be reached, or answers with an error.
        """
        response = await self._send(method, path, content, dict(headers or {}), authenticated)
        try:
            if not response.is_success:
                raise self.refusal(
                    response.status_code, await read_bounded(response, _MAX_ANSWER_BYTES)
                )
            yield response
        finally:
            await response.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: dict[str, str],
        authenticated: bool,
    ) -> httpx.Response:
        headers |= request_id_headers()
        if content is not None:
            headers["Content-Type"] = "application/json"
        while True:
            token = await self.token() if authenticated else None
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
            request = self._http.build_request(
                method, self.url + path, content=content, headers=headers
            )
            try:
                response = await self._http.send(request, stream=True)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                raise self.service.unreachable(error) from error
            self._note_date(response.headers.get("Date"))
            is_turned_away = response.status_code == httpx.codes.UNAUTHORIZED
            if token is None or not is_turned_away or not await self._drop_token(token):
                return response
            await response.aclose()

    def _note_date(self, text: str | None) -> None:
        with contextlib.suppress(ValueError):
            if text:
                self._hub_ahead = parsedate_to_datetime(text).timestamp() - monotonic()

    def refusal(self, status: int, body: bytes) -> HubError:
        """Say in words what the hub answered in place of what was asked for.

        Raises:
            HubUnreachableError: it was not a hub that answered.
        """
        told = self.service.told(status, body)
        message = f"{self.url}: {told.message}"
        if status >= httpx.codes.INTERNAL_SERVER_ERROR:
            return HubUnreachableError(message, hint=told.hint, code=told.code)
        return HubRefusedError(message, hint=told.hint, code=told.code, status=status)

    def dial_options(self, proxy: Proxy | None) -> dict[str, Any]:
        """Return how WebSockets are dialled from here: ``websockets`` takes these by name."""
        return {
            "compression": None,
            "proxy": proxy.url if proxy else None,
            "ssl": self.tls(),
            "open_timeout": self.timeout_seconds,
            "close_timeout": 2.0,
        }
