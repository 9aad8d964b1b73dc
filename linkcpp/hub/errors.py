"""Why the hub refuses a call."""

import math
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response

from linkcpp.common.errors import EXIT_NOT_NOW, LinkcppError
from linkcpp.common.records import ErrorBody

NOT_WRITTEN_YET: Final[dict[int | str, dict[str, Any]]] = {
    202: {"model": ErrorBody, "description": "Done, and not yet written: the database is not there"}
}
HINT_JOIN: Final = "`linkcpp join URL --token …` gets a token of this hub."


class ApiError(LinkcppError):
    """A call that is refused: the HTTP status, a stable code, one sentence, and the way out."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        hint: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.retry_after_seconds = retry_after_seconds
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.exit_code = EXIT_NOT_NOW

    def headers(self) -> dict[str, str]:
        """Return what else goes into the answer's head."""
        if self.retry_after_seconds is None:
            return {}
        return {"Retry-After": str(math.ceil(self.retry_after_seconds))}

    def body(self) -> ErrorBody:
        """Return what the caller is answered."""
        return ErrorBody(code=self.code, message=self.message, hint=self.hint)


def taken_away(unwritten: ApiError | None) -> Response:
    """Answer a call that took something away; ``unwritten`` is why it could not be written yet."""
    if unwritten is None:
        return Response(status_code=204)
    told = ErrorBody(
        code="not_written_yet",
        message=f"It holds from now on, but is not written yet. {unwritten.message}",
        hint="The hub writes it as soon as it can. If the hub stops before that, do it again.",
    )
    return Response(told.model_dump_json(), status_code=202, media_type="application/json")


def revoked() -> ApiError:
    """Return why a machine that was revoked is refused."""
    return ApiError(403, "revoked", "This machine was revoked.", hint=HINT_JOIN)
