"""The keys of the API: as their file holds them, and as a request shows one."""

import hmac
from collections.abc import Iterable
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.front.upstream import Headers

# llama-server reads both, the second as Anthropic's clients send it.
KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a key file (one a line, ``#`` starts a comment), at least one.

    Raises:
        LinkcppError: the file cannot be read or holds no key.
    """
    hint = "Give --api-key-file a file with one key a line."
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        problem = f"The API key file {path} cannot be read: {reason}."
        raise LinkcppError(problem, hint=hint) from None
    except UnicodeDecodeError:
        raise LinkcppError(f"The API key file {path} is not text.", hint=hint) from None
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise LinkcppError(f"The API key file {path} holds no key.", hint=hint)
    return keys


def read_api_key(path: Path) -> str:
    """Return the first key of a key file; raises as ``read_api_keys``."""
    return read_api_keys(path)[0]


def shows_key(headers: Headers, keys: Iterable[str]) -> bool:
    """Whether a request shows one of ``keys``, in a time that does not tell how near it came.

    ``headers`` have names in small letters.
    """
    shown = [_key_in(name, value) for name, value in headers if name in KEY_HEADERS]
    found = [hmac.compare_digest(each, key.encode()) for each in shown for key in keys]
    return any(found)


def _key_in(name: bytes, value: bytes) -> bytes:
    if name != b"authorization":
        return value.strip()
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
