"""What the owner of a machine gave with ``linkcpp join``, kept beside the hub's credentials."""

from pathlib import Path

from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.common.records import Record
from linkcpp.common.units import format_bytes
from linkcpp.registry.credentials import hub_folder
from linkcpp.registry.secret_file import SECRET_MODE


class JoinOptions(Record):
    """The options of a node that stay as they are until they are given again; ``None``: not given.

    ``engine`` is a folder.
    """

    memory_limit_bytes: int | None = None
    slices_limit_bytes: int | None = None
    devices: tuple[str, ...] | None = None
    threads: int | None = None
    engine: Path | None = None
    host: str | None = None
    port: int | None = None
    no_listen: bool | None = None

    def over(self, earlier: "JoinOptions") -> "JoinOptions":
        """Return these, and the earlier ones where nothing was given. Pure."""
        given = {name: value for name, value in self if value is not None}
        if self.no_listen:
            earlier = earlier.model_copy(update={"host": None, "port": None})
        elif self.host is not None or self.port is not None:
            earlier = earlier.model_copy(update={"no_listen": None})
        return earlier.model_copy(update=given)

    def words(self) -> list[str]:
        """Write what is set as it is given on a command line. Pure."""
        words = [
            f"--{name} {format_bytes(size).replace(' ', '')}"
            for name, size in (
                ("memory", self.memory_limit_bytes),
                ("slices", self.slices_limit_bytes),
            )
            if size is not None
        ]
        words += [f"--device {device}" for device in self.devices or ()]
        for name in ("threads", "engine", "host", "port"):
            if (value := getattr(self, name)) is not None:
                words.append(f"--{name} {value}")
        return [*words, "--no-listen"] if self.no_listen else words


def load_join_options(hub_id: str) -> JoinOptions:
    """Read what was given when this machine last joined a hub.

    Raises:
        LinkcppError: the file cannot be read, or holds something else.
    """
    path = _path(hub_id)
    try:
        return JoinOptions.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return JoinOptions()
    except (OSError, ValidationError) as error:
        raise LinkcppError(
            f"{path} does not hold the options of an earlier `linkcpp join`.",
            hint="Add --forget, and the options that you want.",
        ) from error


def save_join_options(hub_id: str, options: JoinOptions) -> None:
    """Keep the options of this time.

    Raises:
        LinkcppError: they cannot be written.
    """
    write_atomically(_path(hub_id), options.model_dump_json(indent=2) + "\n", mode=SECRET_MODE)


def _path(hub_id: str) -> Path:
    return hub_folder(hub_id) / "join-options.json"
