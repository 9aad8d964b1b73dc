"""The rows of every worker of a deployment, checked by its virtual device."""

from collections.abc import Callable
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.dispatch.access import ControlAccess
from linkcpp.dispatch.checks import NOBODY_ELSE, RowCheck
from linkcpp.dispatch.control import CheckRequest, DispatchStatus, WorkerStatus
from linkcpp.dispatch.holder import LinkState
from linkcpp.engine.rpc_server import LOOPBACK
from linkcpp.verify.records import WorkerReport
from linkcpp.verify.silence import silent
from linkcpp.worker.agreement import Verdict, merge

_CHECK_SECONDS = 300.0
_Answer = TypeVar("_Answer", bound=BaseModel)

Progress = Callable[[int, int], None]
"""Told how many of how many are done."""


class RowChecker:
    """Asks the control endpoint of a dispatch process."""

    def __init__(self, access: ControlAccess, expert_count: int) -> None:
        self._expert_count = expert_count
        self._http = httpx.AsyncClient(
            base_url=f"http://{LOOPBACK}:{access.port}",
            headers={"Authorization": f"Bearer {access.token}"},
            timeout=_CHECK_SECONDS,
            trust_env=False,
        )

    async def check_all(self, on_progress: Progress) -> list[WorkerReport]:
        """Check every worker on every layer that it holds.

        Raises:
            LinkcppError: the dispatch process does not answer.
        """
        async with self._http:
            status = await self._ask("GET", "/status", DispatchStatus)
            layers = [sorted({s.layer for s in worker.segments}) for worker in status.workers]
            total, done = sum(map(len, layers)), 0
            reports = []
            for worker, held in zip(status.workers, layers, strict=True):
                checks: list[RowCheck] = []
                problem = worker.detail or None
                for layer in held if worker.state == LinkState.UP else ():
                    try:
                        checks.append(await self._check(worker.name, layer))
                    except LinkcppError as error:
                        problem = error.message
                        break
                    on_progress(done + len(checks), total)
                    if checks[-1].complaint is not None:
                        problem = checks[-1].complaint
                        break
                done += len(held)
                on_progress(done, total)
                reports.append(report_of(worker, checks, problem))
            return reports

    async def _check(self, name: str, layer: int) -> RowCheck:
        request = CheckRequest(layer=layer, expert_count=self._expert_count)
        return await self._ask("POST", f"/workers/{name}/check", RowCheck, request)

    async def _ask(
        self, method: str, path: str, kind: type[_Answer], body: BaseModel | None = None
    ) -> _Answer:
        json = body.model_dump(mode="json") if body is not None else None
        try:
            answer = await self._http.request(method, path, json=json)
            if answer.status_code == httpx.codes.CONFLICT:
                told = answer.json()
                raise LinkcppError(str(told["message"]), hint=told["hint"])
            answer.raise_for_status()
            return kind.model_validate_json(answer.content)
        except httpx.HTTPError as error:
            raise silent("The deployment's dispatch process", error) from error
        except (ValidationError, ValueError, LookupError, TypeError) as error:
            raise LinkcppError(
                "The deployment's dispatch process answers with something else than rows.",
                hint="Launch the deployment again with this version of linkcpp.",
            ) from error


def report_of(worker: WorkerStatus, checks: list[RowCheck], problem: str | None) -> WorkerReport:
    """Sum up a worker. Pure. One that was refused for its rows differs, also if long ago."""
    agreements = [check.agreement for check in checks if check.agreement is not None]
    agreement = merge(agreements) if agreements else None
    verdict = agreement.verdict if agreement is not None else None
    if any(check.complaint is not None for check in checks):
        verdict = Verdict.DIFFERS
    elif worker.admission is not None and worker.state == LinkState.REFUSED:
        agreement = agreement or worker.admission.agreement
        verdict = Verdict.DIFFERS
    return WorkerReport(
        name=worker.name,
        state=worker.state,
        verdict=verdict,
        against=tuple(sorted({check.against for check in checks} - {NOBODY_ELSE})),
        agreement=agreement,
        layer_count=len(checks),
        problem=problem,
        checks=tuple(checks),
    )
