"""Byte sizes and shares as people write and read them."""

import math
import re

from linkcpp.common.errors import LinkcppError

_SUFFIXES = {
    "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6,
    "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def format_bytes(size_bytes: int) -> str:
    """Write a size with three significant digits and a decimal (SI) unit: ``5.31 MB``."""
    value = float(abs(size_bytes))
    sign = "-" if size_bytes < 0 else ""
    if value < 1000:
        return f"{sign}{int(value)} B"
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        # 999.5 would round to "1000 kB": it belongs to the next unit.
        if value < 999.5 or unit == "TB":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{sign}{value:.{digits}f} {unit}"


def parse_bytes(text: str) -> int:
    """Read ``6GB``, ``512 MiB`` or ``1.5g`` as bytes; only ``0`` needs no unit.

    Raises:
        LinkcppError: the text is not a size, or has no unit: who writes 24 means 24 GB.
    """
    match = _SIZE.fullmatch(text)
    if match is not None and not match[2]:
        if float(match[1]) == 0:
            return 0
        raise LinkcppError(
            f"The size {text!r} has no unit.", hint=f"Write it like {match[1]}GB or {match[1]}MiB."
        )
    factor = _SUFFIXES.get(match[2].lower()) if match else None
    if match is None or factor is None or math.isinf(float(match[1]) * factor):
        raise LinkcppError(f"{text!r} is not a size.", hint="Write it like 6GB or 512MiB.")
    return round(float(match[1]) * factor)


def format_percent(share: float) -> str:
    """Write a share of 1 as ``1%``."""
    return f"{100 * share:g}%"


def parse_percent(text: str) -> float:
    """Read ``1%`` or ``0.5 %`` as a share of 1; ``0`` needs no sign.

    Raises:
        LinkcppError: the text is not a percentage from 0 to 100.
    """
    match = _PERCENT.fullmatch("0%" if text.strip() == "0" else text)
    share = float(match[1]) / 100 if match else math.inf
    if share > 1:
        raise LinkcppError(
            f"{text!r} is not a percentage from 0 to 100.", hint="Write it like 1%, 0.5% or 0."
        )
    return share
