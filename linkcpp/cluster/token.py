"""The cluster token: the one secret that all machines of a cluster share.

Whoever has it may start engine processes on every node. It lies in a file that only its owner may
read, and it never leaves the machine over a network: links prove it (``linkcpp.link.handshake``).
``docs/security.md`` says what this protects and what it does not.
"""

import hmac
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
# token could be guessed offline, from a handshake that somebody recorded.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{43,512}")


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
        LinkcppError: it is not a token, or this machine has another one and ``replace`` is false.
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
