"""The file of this machine's settings, ``config.toml``, as far as every room reads it alike."""

import tomllib
from pathlib import Path
from typing import Any

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import config_folder

_MAX_FILE_BYTES = 2**20


def config_path() -> Path:
    """Where the settings are read from."""
    return config_folder() / "config.toml"


def read_config_file() -> dict[str, Any]:
    """Read the keys of the file, not checked; none where there is no file.

    Raises:
        LinkcppError: the file cannot be read, or is not TOML.
    """
    path = config_path()
    try:
        with path.open("rb") as file:
            return tomllib.loads(file.read(_MAX_FILE_BYTES).decode())
    except FileNotFoundError:
        return {}
    except RecursionError:
        reason = "its values are nested too deep"
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = str(error)
    raise LinkcppError(f"{path} cannot be read: {reason}.", hint="Mend or delete it.")
