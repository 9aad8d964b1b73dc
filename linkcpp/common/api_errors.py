"""An HTTP API of linkcpp, and how it answers what goes wrong: a code, one sentence, a hint."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from linkcpp import __version__
from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import ErrorBody

_MAX_PROBLEMS = 5
_CODES = {400: "invalid_request", 404: "unknown_route", 405: "unknown_method"}


def new_api(title: str, *, defect: ErrorBody) -> FastAPI:
    """Make an application without calls yet that answers every error with an ``ErrorBody``.

    ``defect`` is the answer where the application itself is wrong.
    """
    # No documentation pages: they load scripts from elsewhere. Who wants to serves the description.
    app = FastAPI(
        title=title,
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}},
        redirect_slashes=False,
    )

    @app.exception_handler(LinkcppError)
    async def on_user_error(_: Request, error: LinkcppError) -> JSONResponse:
        body = ErrorBody(code="refused", message=error.message, hint=error.hint)
        return JSONResponse(body.model_dump(), 409)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        body = ErrorBody(
            code=_CODES.get(error.status_code, "refused"),
            message=f"{request.method} {request.url.path[:200]}: {error.detail}.",
            hint="GET /v1/openapi.json describes every call.",
        )
        return JSONResponse(body.model_dump(), error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(invalid_request(error).model_dump(), 422)

    @app.exception_handler(Exception)
    async def on_defect(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(defect.model_dump(), 500)

    return app


def invalid_request(error: RequestValidationError | ValidationError) -> ErrorBody:
    """Say what is wrong with the first values of a request, without repeating them. Pure."""
    parts = []
    for problem in error.errors()[:_MAX_PROBLEMS]:
        place = ".".join(str(part) for part in problem["loc"] if part != "body")
        parts.append(f"{place or 'the body'}: {problem['msg']}")
    return ErrorBody(code="invalid_request", message=f"Invalid request: {'; '.join(parts)}.")
