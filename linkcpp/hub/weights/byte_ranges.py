"""HTTP's byte ranges (RFC 9110, section 14), as far as a hub answers them. Pure."""

import re
from typing import Final, NamedTuple

_RANGE: Final = re.compile(r"bytes\s*=\s*(\d{0,19})\s*-\s*(\d{0,19})", re.IGNORECASE)


class ByteRange(NamedTuple):
    """The bytes from ``start`` to ``end`` (not included); ``None`` for both: not satisfiable."""

    start: int | None
    end: int | None


def asked_range(
    header: str | None, if_range: str | None, etag: str, size_bytes: int
) -> ByteRange | None:
    """Read a ``Range`` header; ``None`` where the whole file is to be sent.

    Several ranges at once, other units and what is not a range are ignored, as the RFC allows; so
    is a range of another state of the file than the one that ``If-Range`` names.
    """
    if header is None or (if_range is not None and if_range.strip() != etag):
        return None
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.group(1, 2) == ("", ""):
        return None
    first, last = match.group(1, 2)
    if not first:
        count = min(int(last), size_bytes)
        return ByteRange(size_bytes - count, size_bytes) if count else ByteRange(None, None)
    start = int(first)
    if last and int(last) < start:
        return None
    if start >= size_bytes:
        return ByteRange(None, None)
    return ByteRange(start, min(int(last) + 1 if last else size_bytes, size_bytes))


def is_known(if_none_match: str | None, etag: str) -> bool:
    """Whether the caller has this state of the file already."""
    if if_none_match is None:
        return False
    known = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in known or "*" in known
