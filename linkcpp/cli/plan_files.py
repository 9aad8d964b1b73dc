"""Plan files on disk, for the verbs that write and read them."""

from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import users_mode, write_atomically
from linkcpp.common.text import shell_command
from linkcpp.model.header import MAGIC
from linkcpp.planning.documents import MAX_PLAN_BYTES, parse_plan, plan_text
from linkcpp.planning.records import Plan
from linkcpp.planning.routing_counts import RoutingCounts, parse_counts


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan file, into a folder that is there.

    Raises:
        LinkcppError: it cannot be written.
    """
    require_plan_folder(path)
    write_atomically(path, plan_text(plan), mode=users_mode())


def require_plan_folder(path: Path) -> None:
    """Refuse a place for a plan that no plan can be written to.

    Raises:
        LinkcppError: its folder is not there, or it is a folder itself.
    """
    _require_folder(path, "the plan", "--output")


def save_counts(counts: RoutingCounts, path: Path) -> None:
    """Write recorded routing counts, into a folder that is there.

    Raises:
        LinkcppError: they cannot be written.
    """
    _require_folder(path, "the routing counts", "--routing-counts")
    write_atomically(path, counts.model_dump_json(indent=1) + "\n", mode=users_mode())


def _require_folder(path: Path, what: str, option: str) -> None:
    if path.is_dir():
        raise LinkcppError(f"{path} is a folder.", hint=f"Name a file in it with {option}.")
    if not path.parent.is_dir():
        raise LinkcppError(
            f"There is no folder {path.parent} to write {what} to.",
            hint=f"Make it first, or name another file with {option}.",
        )


def load_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        LinkcppError: it cannot be read, is not a plan, or was written by a newer linkcpp.
    """
    return parse_plan(read_document(path, "plan"), source=str(path))


def load_counts(path: Path) -> RoutingCounts:
    """Read recorded routing counts.

    Raises:
        LinkcppError: they cannot be read, or are not counts.
    """
    return parse_counts(read_document(path, "record of routing counts"), source=str(path))


def read_document(path: Path, kind: str) -> bytes:
    """Read a small JSON file whole.

    Raises:
        LinkcppError: it cannot be read, or is far larger than such a file can be.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise LinkcppError(
            f"Cannot read the {kind} {path}: {error.strerror or error}.",
            hint=f"Name a file that exists and holds a {kind}.",
        ) from error
    if content.startswith(MAGIC):
        command = shell_command("linkcpp", "plan", "--model", path, "-o", "plan.json")
        raise LinkcppError(
            f"{path} is a model, not a {kind}.",
            hint=f"Make a plan for it first: {command}",
        )
    if len(content) > MAX_PLAN_BYTES:
        raise LinkcppError(f"{path} is too large for a {kind}.", hint="Is it another file?")
    return content
