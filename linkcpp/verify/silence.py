"""A program that stopped answering, told of in words."""

import httpx

from linkcpp.common.errors import LinkcppError
from linkcpp.common.network_errors import in_words


class SilentError(LinkcppError):
    """A program that was asked does not answer any more."""


def silent(who: str, error: httpx.HTTPError, hint: str | None = None) -> SilentError:
    """Say in words why there was no answer. Pure."""
    return SilentError(f"{who} stopped answering: {in_words(error)}.", hint=hint)
