"""What this machine keeps of each hub that it joined, and of the machines it met through it.

A folder for each hub, named by the hub's id: ``credentials.json``, which only the owner may read,
and ``peers/``, one file for each machine's X25519 key. A key is trusted when it is first seen and
pinned from then on, so that a hub cannot put another machine in the place of a known one.
"""

from pathlib import Path

from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically, write_once
from linkcpp.common.paths import config_folder
from linkcpp.common.records import Record
from linkcpp.common.text import printable
from linkcpp.registry.encoding import fingerprint
from linkcpp.registry.fields import MachineId, Name, PublicKey, Url
from linkcpp.registry.records import NodeToken
from linkcpp.registry.secret_file import SECRET_MODE, read_secret
from linkcpp.registry.tickets import HubKey


class HubCredentials(Record):
    """A hub that this machine joined as ``name``, with the last token that it gave."""

    url: Url
    name: Name | None = None
    hub_id: MachineId
    hub_public_key: PublicKey
    node_token: NodeToken

    @property
    def hub_key(self) -> HubKey:
        """What verifies the hub's tickets."""
        return HubKey.parse(self.hub_id, self.hub_public_key)


def save_credentials(credentials: HubCredentials) -> None:
    """Keep the credentials of a hub in place of older ones.

    Raises:
        LinkcppError: they cannot be written.
    """
    content = credentials.model_dump_json(indent=2) + "\n"
    write_atomically(_path(credentials.hub_id), content, mode=SECRET_MODE)


def load_credentials(
    url: str,
    *,
    hint: str = "`linkcpp join URL --token …`; `linkcpp hub token create` makes a token there.",
) -> HubCredentials:
    """Find what this machine knows of the hub at ``url``; ``hint`` is for one that knows nothing.

    Raises:
        LinkcppError: it did not join that hub, or the file cannot be used.
    """
    wanted = url.rstrip("/")
    for known in list_credentials():
        if known.url == wanted:
            return known
    raise LinkcppError(
        f"This machine did not join the hub at {printable(wanted, 200)}.",
        hint=hint,
    )


def joined_name(url: str) -> str | None:
    """Return what this machine called itself when it joined the hub at ``url``, if it did.

    Raises:
        LinkcppError: as ``list_credentials``.
    """
    names = (known.name for known in list_credentials() if known.url == url.rstrip("/"))
    return next(names, None)


def list_credentials() -> tuple[HubCredentials, ...]:
    """Return the credentials of every hub that this machine joined.

    Raises:
        LinkcppError: a file cannot be read, is open to other users, or holds something else.
    """
    return tuple(_read(path) for path in sorted(_folder().glob("*/credentials.json")))


def pin_peer(hub_id: str, node_id: str, edge_key: str) -> None:
    """Trust a machine's X25519 key at first sight, and only that one from then on.

    Raises:
        LinkcppError: the machine had another key before, or the key cannot be kept.
    """
    path = hub_folder(hub_id) / "peers" / node_id
    write_once(path, edge_key + "\n")
    try:
        pinned = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise LinkcppError(f"{path} cannot be read: {error}.", hint="Delete it.") from error
    if pinned != edge_key:
        raise LinkcppError(
            f"The machine {node_id} has another key than before: it was installed anew, or "
            f"somebody else answers in its place. Its key now: {fingerprint(edge_key)}.",
            hint=f"Ask its owner whether the key is new; if it is, delete {path}.",
        )


def hub_folder(hub_id: str) -> Path:
    """Return the folder of what this machine keeps of a hub."""
    return _folder() / hub_id


def _folder() -> Path:
    return config_folder() / "hubs"


def _path(hub_id: str) -> Path:
    return hub_folder(hub_id) / "credentials.json"


def _read(path: Path) -> HubCredentials:
    try:
        return HubCredentials.model_validate_json(read_secret(path, "a hub's credentials"))
    except ValidationError:
        raise LinkcppError(
            f"{path} does not hold the credentials of a hub.",
            hint="Delete it, and join the hub again.",
        ) from None
