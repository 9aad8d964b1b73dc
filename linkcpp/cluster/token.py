"""The cluster token: the one secret that all machines of a cluster share.

Whoever has it may start engine processes on every node. It lies in a file that only its owner may
read, and a host sees it only after it has proved that it has it too (``health_proof``).
``docs/security.md`` says what this protects and what it does not.
"""

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically, write_once
from linkcpp.common.paths import config_folder
from linkcpp.common.text import shell_command

TOKEN_FILE_VARIABLE = "LINKCPP_TOKEN_FILE"  # noqa: S105 - the name of a variable, no secret

_MODE = 0o600
_OPEN_TO_OTHERS = 0o077
_MAX_FILE_BYTES = 4096
# The characters of a Bearer token (RFC 6750, section 2.1). 43 of base64 carry 256 bits; a shorter
# token could be guessed offline, since anybody may ask an agent for proofs.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{43,512}")
_CHALLENGE = re.compile(r"[A-Za-z0-9_-]{16,128}")
_PROOF_CONTEXT = b"linkcpp-health-v1"


def token_path() -> Path:
    """Where the token lies: ``LINKCPP_TOKEN_FILE``, or ``token`` in the config folder."""
    if override := os.environ.get(TOKEN_FILE_VARIABLE):
        return Path(override)
    return config_folder() / "token"


def load_token() -> str:
    """Read the cluster token.

    Raises:
        LinkcppError: there is no token, other users may read it, or the file holds no token.
    """
    token = find_token()
    if token is None:
        raise LinkcppError(
            "This machine has no cluster token.",
            hint="`linkcpp token create` makes the first one; on every other machine "
            "`linkcpp token set` takes the same one over.",
        )
    return token


def find_token() -> str | None:
    """Read the cluster token; ``None`` where this machine has none yet.

    Raises:
        LinkcppError: other users may read it, or the file holds no token.
    """
    path = token_path()
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LinkcppError(
            f"The token file {path} cannot be read: {error.strerror or error}.",
            hint="Make it readable for this user, or set LINKCPP_TOKEN_FILE to another file.",
        ) from error
    if os.name == "posix" and mode & _OPEN_TO_OTHERS:
        raise LinkcppError(
            f"The token file {path} may be used by other users (mode {mode:04o}).",
            hint=f"`{shell_command('chmod', '600', path)}`; if somebody may have read it already, "
            "`linkcpp token create --replace`.",
        )
    return parse_token(content.decode("ascii", errors="replace"))


def parse_token(text: str) -> str:
    """Take white space off and check that the text can be a token.

    Raises:
        LinkcppError: it is empty, too short to be safe, or has characters no token has.
    """
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise LinkcppError(
            "That is not a cluster token: a token is one line of at least 43 letters, digits and "
            "any of . _ ~ + / = -",
            hint="`linkcpp token --show` prints the token of a machine that has one.",
        )
    return token


def create_token(*, replace: bool = False) -> str:
    """Make a token of 256 random bits and store it.

    Raises:
        LinkcppError: there is one already and ``replace`` is false, or it cannot be written.
    """
    token = secrets.token_urlsafe(32)
    if replace:
        write_atomically(token_path(), token + "\n", mode=_MODE)
    elif not write_once(token_path(), token + "\n", mode=_MODE):
        raise LinkcppError(
            f"There is a cluster token already, in {token_path()}.",
            hint="`linkcpp token create --replace` makes a new one; every other machine then "
            "needs the new one too.",
        )
    return token


def store_token(text: str, *, replace: bool = False) -> bool:
    """Store a token that another machine made; tell whether it is in place of another one.

    Raises:
        LinkcppError: it is no token, or this machine has another one and ``replace`` is false.
    """
    token = parse_token(text)
    path = token_path()
    if write_once(path, token + "\n", mode=_MODE):
        return False
    try:
        is_other = not tokens_equal(load_token(), token)
    except LinkcppError:
        is_other = True
    if is_other and not replace:
        raise LinkcppError(
            f"This machine has another cluster token already, in {path}.",
            hint="`linkcpp token set --replace` puts the new one in its place; a node that runs "
            "here must then be started again.",
        )
    write_atomically(path, token + "\n", mode=_MODE)
    return is_other


def tokens_equal(left: str, right: str) -> bool:
    """Compare two tokens in a time that does not tell where they differ."""
    return hmac.compare_digest(left.encode("utf-8", "replace"), right.encode("utf-8", "replace"))


def make_challenge() -> str:
    """Return 256 fresh random bits that a host must answer with a proof."""
    return secrets.token_urlsafe(32)


def is_challenge(text: str) -> bool:
    """Tell whether the text is what a client may send as a challenge."""
    return _CHALLENGE.fullmatch(text) is not None


def canonical_address(host: str, port: int) -> str:
    """Write a socket's end the same way on both sides: ``10.0.0.5:8716``, ``[fe80::1]:8716``.

    An IPv6 zone names an interface of one machine and means nothing on the other, so it is left
    out; an IPv4 address that a dual-stack socket shows as ``::ffff:10.0.0.5`` is written as IPv4.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return f"{host.lower()}:{port}"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"[{address.compressed}]:{port}"
        address = address.ipv4_mapped
    return f"{address}:{port}"


def health_proof(token: str, *, challenge: str, node_id: str, address: str) -> str:
    """Prove knowledge of the token without showing it: HMAC-SHA256 as 64 hex digits.

    The message is a context string and the three values, each with its length before it, so that
    no two different triples give one message. ``address`` is that of the agent's own end of the
    connection (``canonical_address``).
    """
    parts = (
        _PROOF_CONTEXT,
        challenge.encode("utf-8", "replace"),
        node_id.encode("utf-8", "replace"),
        address.encode("utf-8", "replace"),
    )
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(token.encode("utf-8", "replace"), message, hashlib.sha256).hexdigest()


def verify_health_proof(
    token: str, proof: str, *, challenge: str, node_id: str, address: str
) -> bool:
    """Check a proof in constant time."""
    expected = health_proof(token, challenge=challenge, node_id=node_id, address=address)
    return hmac.compare_digest(expected.encode(), proof.encode("utf-8", "replace"))
