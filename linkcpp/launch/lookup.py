"""A deployment by what a person has at hand: its name, or the plan that it was launched from."""

from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.launch.folder import DeploymentFolder, all_deployments, existing_deployment
from linkcpp.planning.documents import parse_plan

MAX_PLAN_BYTES = 16 * 2**20


def find_deployment(word: str | None) -> DeploymentFolder:
    """Return the deployment of that name, or the latest one that was launched from that plan file.

    Raises:
        LinkcppError: there is none, or without a word there are none or several.
    """
    if word is None or not word.endswith(".json"):
        return existing_deployment(word)
    try:
        with Path(word).expanduser().open("rb") as file:
            plan = parse_plan(file.read(MAX_PLAN_BYTES), source=word)
    except OSError as error:
        raise LinkcppError(
            f"The plan {word} cannot be read: {(error.strerror or str(error)).lower()}.",
            hint="Name a deployment (`linkcpp status` lists them) or a plan file.",
        ) from error
    launched = []
    for folder in all_deployments():
        try:
            if folder.read_request().plan == plan:
                launched.append((folder.read_state().created_at, folder.name, folder))
        except LinkcppError:
            continue
    if not launched:
        raise LinkcppError(
            f"Nothing was launched from {word}.", hint=f"`linkcpp launch {word}` does so."
        )
    return max(launched)[2]
