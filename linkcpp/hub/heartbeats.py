"""The call that a thousand nodes make a second: plain ASGI, past the framework of all others."""

from typing import Final

from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linkcpp.common.access import refuse
from linkcpp.common.api_errors import invalid_request
from linkcpp.hub.errors import ApiError
from linkcpp.hub.registrar import Registrar
from linkcpp.hub.roles import Allowed, Caller
from linkcpp.registry.records import HEARTBEAT_SECONDS, Heartbeat, HeartbeatAnswer, Role

HEARTBEAT_PATH: Final = "/v1/heartbeat"
HEARTBEAT_ROLES: Final = (Role.NODE,)

_NOTHING_NEW: Final = HeartbeatAnswer(interval_seconds=HEARTBEAT_SECONDS).model_dump_json().encode()
_HEADERS: Final = [(b"content-type", b"application/json")]


class HeartbeatEndpoint:
    """Answers ``POST /v1/heartbeat``; everything else goes to ``app``."""

    def __init__(self, app: ASGIApp, registrar: Registrar) -> None:
        self._app = app
        self._registrar = registrar
        self._allowed = Allowed(HEARTBEAT_ROLES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, whose caller is known and whose body is here."""
        is_heartbeat = scope["type"] == "http" and scope["path"] == HEARTBEAT_PATH
        if not is_heartbeat or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope["route"] = self
        message = await receive()
        try:
            content = await self._answer(scope["state"]["caller"], message)
        except ApiError as error:
            await refuse(scope, send, error.status, error.body())
            return
        except ValidationError as error:
            await refuse(scope, send, 422, invalid_request(error))
            return
        length = (b"content-length", b"%d" % len(content))
        await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, length]})
        await send({"type": "http.response.body", "body": content})

    @property
    def path(self) -> str:
        """The route's name in metrics."""
        return HEARTBEAT_PATH

    async def _answer(self, caller: Caller, message: Message) -> bytes:
        self._allowed.check(caller)
        body = Heartbeat.model_validate_json(message.get("body", b""))
        answer = await self._registrar.heartbeat(caller.node_id, body)
        return answer.model_dump_json().encode() if answer is not None else _NOTHING_NEW
