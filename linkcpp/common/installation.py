"""How this very installation of linkcpp gets what an optional part of it needs.

No package index has linkcpp, so that a command can only name where this one came from.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from linkcpp.common.errors import LinkcppError

_CHECKOUT = Path(__file__).resolve().parents[2]


@contextmanager
def needing_extra(verb: str, extra: str) -> Iterator[None]:
    """Let a verb import what is in an extra, where it is used and not before: help needs none.

    Raises:
        LinkcppError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "linkcpp").partition(".")[0] == "linkcpp":
            raise
        raise LinkcppError(
            f"`linkcpp {verb}` needs {error.name}, which is not installed.",
            hint=f"`{install_command(extra)}`",
        ) from error


def install_command(extra: str) -> str:
    """Return the command that adds an extra, such as ``hub``, with paths that work from anywhere.

    Where nothing tells where linkcpp came from, it is one to be typed in a checkout.
    """
    words = [sys.executable, "-m", "pip", "install", *_requirement(extra)]
    return shlex.join(words)


def _requirement(extra: str) -> list[str]:
    if (_CHECKOUT / "pyproject.toml").is_file():
        return ["-e", f"{_CHECKOUT}[{extra}]"]
    source = _source()
    url = source.get("url", "")
    parts = urlsplit(url)
    if parts.scheme == "file" and "dir_info" in source:
        return [f"{url2pathname(parts.path)}[{extra}]"]
    if vcs := source.get("vcs_info"):
        return [f"linkcpp[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}"]
    return [f"linkcpp[{extra}] @ {url}" if url else f".[{extra}]"]


def _source() -> dict[str, Any]:
    """Read what pip noted of where it took linkcpp from (PEP 610)."""
    try:
        noted = metadata.distribution("linkcpp").read_text("direct_url.json")
        return dict(json.loads(noted or "{}"))
    except (metadata.PackageNotFoundError, ValueError):
        return {}
