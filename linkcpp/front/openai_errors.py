"""Errors of the front in the form that llama-server and the OpenAI API give them."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from linkcpp.dispatch.access import ControlAccess
from linkcpp.dispatch.control import DispatchStatus
from linkcpp.engine.rpc_server import LOOPBACK
from linkcpp.model.slices.segments import merge_ranges, write_ranges

_ASK_SECONDS = 2.0
_NAMED_LAYERS = 4
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    501: "not_supported_error",
    502: "server_error",
    503: "unavailable_error",
}


@dataclass(frozen=True)
class ApiError:
    """An answer that is an error; ``missing`` has the experts of each layer that nobody had."""

    status: int
    message: str
    missing: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the JSON object that is sent."""
        error: dict[str, Any] = {
            "code": self.status,
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error"),
        }
        if self.missing:
            error["missing_experts"] = [
                {"layer": layer, "experts": list(experts)}
                for layer, experts in sorted(self.missing.items())
            ]
        return {"error": error}


def error_of(status: DispatchStatus) -> ApiError:
    """Say which experts nobody had in the calls that failed last, or that rows differ. Pure."""
    if status.failures and status.failures[-1].are_in_doubt:
        # Anybody may read this, so it names no machine; `linkcpp status` does.
        return ApiError(
            503,
            "Some of the rows that this answer was made of were computed a second time and "
            "differed, so it may be wrong and ends here. Ask again.",
        )
    missing: dict[int, set[int]] = {}
    for call in status.failures:
        if not call.are_in_doubt:
            missing.setdefault(call.layer, set()).update(call.experts)
    named = [
        f"{write_ranges(merge_ranges((expert, expert) for expert in experts))} of layer {layer}"
        for layer, experts in sorted(missing.items())
    ]
    rest = len(named) - _NAMED_LAYERS
    if rest > 0:
        named[_NAMED_LAYERS:] = [f"others of {rest} more layer{'s' if rest > 1 else ''}"]
    message = f"No worker has the experts {', '.join(named)}, and there is no local fallback."
    return ApiError(503, message, {layer: tuple(sorted(e)) for layer, e in missing.items()})


class DispatchClient:
    """Asks the dispatch process why a request has failed.

    ``control_file`` says where it is; there is none while none runs.
    """

    def __init__(self, control_file: Path) -> None:
        self._control_file = control_file

    async def failure(self) -> ApiError:
        """Return the error for a request whose experts were missing."""
        status = await self.status()
        if status is None:
            return ApiError(503, "No worker has some experts that this request needs.")
        return error_of(status)

    async def status(self) -> DispatchStatus | None:
        """Return how the dispatch process stands; ``None`` where none answers."""
        try:
            text = await asyncio.to_thread(self._control_file.read_bytes)
            access = ControlAccess.model_validate_json(text)
            url = f"http://{LOOPBACK}:{access.port}/status"
            async with httpx.AsyncClient(timeout=_ASK_SECONDS, trust_env=False) as client:
                answer = await client.get(url, headers={"Authorization": f"Bearer {access.token}"})
                answer.raise_for_status()
                return DispatchStatus.model_validate_json(answer.content)
        except (OSError, httpx.HTTPError, ValidationError):
            return None
