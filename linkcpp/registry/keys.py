"""This machine's two keys: Ed25519 proves who it is to hubs, X25519 protects its edges.

Made at first use, in one file in the config folder that only its owner may read.
"""

from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_once
from linkcpp.common.paths import config_folder
from linkcpp.common.records import Record
from linkcpp.registry.encoding import decode, encode
from linkcpp.registry.fields import PublicKey
from linkcpp.registry.secret_file import SECRET_MODE, read_secret


class _KeyFile(Record):
    signing_private: PublicKey  # 32 bytes as well
    edge_private: PublicKey


class MachineKeys(NamedTuple):
    """The private keys; the public ones are text as the hub's records have it."""

    signing: Ed25519PrivateKey
    edge: X25519PrivateKey

    @property
    def signing_public(self) -> str:
        """The Ed25519 key that verifies this machine's proofs."""
        return encode(self.signing.public_key().public_bytes_raw())

    @property
    def edge_public(self) -> str:
        """The X25519 key that edges to this machine are bound to."""
        return encode(self.edge.public_key().public_bytes_raw())


def keys_path() -> Path:
    """Where the keys lie."""
    return config_folder() / "machine-keys.json"


def make_keys() -> MachineKeys:
    """Make new keys; nothing is stored."""
    return MachineKeys(Ed25519PrivateKey.generate(), X25519PrivateKey.generate())


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # in a folder that this user may not enter: what reads it says so
        return True


def load_keys() -> MachineKeys:
    """Read this machine's keys, or make them.

    Raises:
        LinkcppError: the file cannot be read or written, holds no keys, or others may read it.
    """
    path = keys_path()
    if not _is_there(path):
        made = make_keys()
        content = _KeyFile(
            signing_private=encode(made.signing.private_bytes_raw()),
            edge_private=encode(made.edge.private_bytes_raw()),
        )
        write_once(path, content.model_dump_json() + "\n", mode=SECRET_MODE)
    try:
        stored = _KeyFile.model_validate_json(read_secret(path, "this machine's keys"))
        return MachineKeys(
            Ed25519PrivateKey.from_private_bytes(decode(stored.signing_private)),
            X25519PrivateKey.from_private_bytes(decode(stored.edge_private)),
        )
    except (ValidationError, ValueError):
        raise LinkcppError(
            f"{path} does not hold this machine's keys.",
            hint="Delete it to get new keys; hubs know this machine by the old ones, so an admin "
            "must revoke it there (`linkcpp hub revoke`) before it joins again.",
        ) from None
