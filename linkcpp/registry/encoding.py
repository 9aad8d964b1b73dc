"""Keys, signatures and random bits as text: base64url without padding. Pure but for ``nonce``."""

import base64
import binascii
import hashlib
import secrets


def encode(raw: bytes) -> str:
    """Write bytes as text."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def decode(text: str) -> bytes:
    """Read what ``encode`` wrote.

    Raises:
        ValueError: the text is not base64url, or not the one way to write these bytes.
    """
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not base64url") from error
    if encode(raw) != text:
        raise ValueError("not base64url in its one form")
    return raw


def nonce() -> str:
    """Return 128 fresh random bits."""
    return secrets.token_urlsafe(16)


def fingerprint(public_key: str) -> str:
    """Name a public key in a form that two people can compare: ``3f9a 10c4 …``, 32 hex digits."""
    digest = hashlib.sha256(decode(public_key)).hexdigest()[:32]
    return " ".join(digest[start : start + 4] for start in range(0, 32, 4))
