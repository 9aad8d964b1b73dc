"""The per-user folders that linkcpp writes to, by the XDG base directory specification.

``LINKCPP_HOME`` puts all of them below one folder: several independent installations (or tests)
on one machine then never meet.
"""

import os
from pathlib import Path

from linkcpp.common.errors import LinkcppError


def _folder(variable: str, fallback: str, name: str) -> Path:
    if home := os.environ.get("LINKCPP_HOME"):
        return Path(home) / name
    if base := os.environ.get(variable):
        return Path(base) / "linkcpp"
    return home_folder() / fallback / "linkcpp"


def home_folder() -> Path:
    """The user's own folder.

    Raises:
        LinkcppError: neither ``HOME`` nor the system's list of users names one.
    """
    return expand_home(Path("~"))


def expand_home(path: Path) -> Path:
    """Replace ``~`` or ``~user`` at the start of a path.

    Raises:
        LinkcppError: there is no such user, or this one has no home folder.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        name = path.parts[0].removeprefix("~")
        raise LinkcppError(
            f"There is no home folder for {name or 'this user'}.",
            hint="Write the whole path, and set HOME or LINKCPP_HOME where the user has none.",
        ) from error


def config_folder() -> Path:
    """Where settings and the cluster token live."""
    return _folder("XDG_CONFIG_HOME", ".config", "config")


def state_folder() -> Path:
    """Where deployments, logs and the node's identity live."""
    return _folder("XDG_STATE_HOME", ".local/state", "state")


def cache_folder() -> Path:
    """Where things live that can be made again: checks, measurements."""
    return _folder("XDG_CACHE_HOME", ".cache", "cache")


def data_folder() -> Path:
    """Where installed engines live."""
    return _folder("XDG_DATA_HOME", ".local/share", "data")


def own_folders() -> tuple[Path, ...]:
    """All of these; none where the user has no home folder."""
    try:
        return config_folder(), state_folder(), cache_folder(), data_folder()
    except LinkcppError:
        return ()
