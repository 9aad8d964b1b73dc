"""What makes a hub this hub: its id, the key that signs tokens, the token of its metrics.

In files of the data folder that only its owner may read. Whoever has ``identity.json`` is the hub.
"""

import secrets
import uuid
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_once
from linkcpp.common.records import Record
from linkcpp.registry.encoding import decode, encode
from linkcpp.registry.fields import MachineId, PublicKey
from linkcpp.registry.records import NodeToken, Role
from linkcpp.registry.secret_file import SECRET_MODE, read_secret
from linkcpp.registry.tickets import HubKey, NodeClaims, sign_node_token

IDENTITY_FILE = "identity.json"
_METRICS_TOKEN = "metrics-token"  # noqa: S105 - a file's name


class _IdentityFile(Record):
    hub_id: MachineId
    signing_private: PublicKey  # 32 bytes as well


class HubIdentity(NamedTuple):
    """A hub's id and secrets."""

    hub_id: str
    signing: Ed25519PrivateKey
    metrics_token: str

    @property
    def public_key(self) -> str:
        """What verifies the hub's tokens, as text."""
        return encode(self.signing.public_key().public_bytes_raw())

    @property
    def verifier(self) -> HubKey:
        """The same for ``linkcpp.registry.tickets``."""
        return HubKey(self.hub_id, self.signing.public_key())

    def issue(
        self,
        subject: str,
        role: Role,
        *,
        now: float,
        lifetime_seconds: float,
        joined_at: float | None = None,
    ) -> NodeToken:
        """Sign a token for a machine that joined at ``joined_at``.

        The hub's own id as subject stands for its operator, who never joined.
        """
        claims = NodeClaims.model_validate(
            {
                "iss": self.hub_id,
                "sub": subject,
                "role": role,
                "iat": now,
                "exp": now + lifetime_seconds,
                "joined": joined_at,
                "jti": uuid.uuid4().hex,
            }
        )
        token = sign_node_token(self.signing, claims)
        return NodeToken(token=token, role=role, expires_at=claims.exp)


def is_hub_folder(data: Path) -> bool:
    """Whether a hub keeps its data in this folder."""
    try:
        return (data / IDENTITY_FILE).exists()
    except OSError:  # of another user
        return False


def load_hub_identity(data: Path, *, create: bool = False) -> HubIdentity:
    """Read the identity in a hub's data folder; ``create`` makes it where there is none.

    Raises:
        LinkcppError: there is none, or its file cannot be used.
    """
    path = data / IDENTITY_FILE
    if create and not path.exists():
        made = _IdentityFile.model_validate(
            {
                "hub_id": str(uuid.uuid4()),
                "signing_private": encode(Ed25519PrivateKey.generate().private_bytes_raw()),
            }
        )
        write_once(path, made.model_dump_json(indent=2) + "\n", mode=SECRET_MODE)
    if create:
        write_once(data / _METRICS_TOKEN, secrets.token_urlsafe(32) + "\n", mode=SECRET_MODE)
    if not is_hub_folder(data):
        raise LinkcppError(
            f"{data} is not the data folder of a hub.",
            hint="`linkcpp hub --data FOLDER` makes one; name the same folder here.",
        )
    try:
        stored = _IdentityFile.model_validate_json(read_secret(path, "a hub's secrets"))
        signing = Ed25519PrivateKey.from_private_bytes(decode(stored.signing_private))
    except (ValidationError, ValueError):
        raise LinkcppError(
            f"{path} does not hold a hub's secrets.", hint="Restore it from a backup."
        ) from None
    metrics_token = read_secret(data / _METRICS_TOKEN, "the token of a hub's metrics").strip()
    return HubIdentity(stored.hub_id, signing, metrics_token)
