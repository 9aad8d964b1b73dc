"""How often each expert of a deployment was chosen: asked of it, or read from where it left it."""

import httpx

from linkcpp.common.errors import LinkcppError
from linkcpp.engine.rpc_server import LOOPBACK
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.planning.records import PlanMode
from linkcpp.planning.routing_counts import RoutingCounts, parse_counts

_CALL_SECONDS = 10.0
_MAX_FILE_BYTES = 64 * 2**20


def routing_counts_of(folder: DeploymentFolder) -> RoutingCounts:
    """Return the counts of a deployment, whether it runs or has ended, over all its launches.

    Raises:
        LinkcppError: it is not of mode ``experts``, or has counted nothing yet.
    """
    if folder.read_plan().mode is not PlanMode.EXPERTS:
        raise LinkcppError(
            f"{folder.name} does not spread experts, so nobody counts which are chosen.",
            hint="Plan with --mode experts, launch that, and let it answer requests.",
        )
    counts = _asked(folder) or _saved(folder)
    if counts is None or not any(counts.layers.values()):
        raise LinkcppError(
            f"{folder.name} has not computed any expert yet.",
            hint="Let it answer requests like those that it is for.",
        )
    return counts


def _asked(folder: DeploymentFolder) -> RoutingCounts | None:
    if not folder.control_file.is_file():
        return None
    try:
        access = folder.read_control()
        answer = httpx.get(
            f"http://{LOOPBACK}:{access.port}/routing-counts",
            headers={"Authorization": f"Bearer {access.token}"},
            timeout=_CALL_SECONDS,
            trust_env=False,
        )
        answer.raise_for_status()
        return parse_counts(answer.content, source="the dispatch process")
    except (httpx.HTTPError, LinkcppError):
        # It may just have ended; then it has saved them.
        return None


def _saved(folder: DeploymentFolder) -> RoutingCounts | None:
    path = folder.routing_counts_file
    try:
        with path.open("rb") as file:
            return parse_counts(file.read(_MAX_FILE_BYTES), source=str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LinkcppError(
            f"Cannot read {path}: {error.strerror}.", hint="See who may read that folder."
        ) from error
