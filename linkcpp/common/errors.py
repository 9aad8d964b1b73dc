"""Errors that a user can do something about."""

import errno
from typing import Final

EXIT_ERROR: Final = 2
# EX_TEMPFAIL of sysexits.h. Service managers start a program again that ended with it.
EXIT_NOT_NOW: Final = 75

_PASSING: Final = frozenset(
    {
        *(errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENOSPC, errno.EDQUOT),
        *(errno.EAGAIN, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE),
    }
)


class LinkcppError(Exception):
    """An expected failure, told in one sentence with the way out.

    The command line prints ``message`` and ``hint`` and exits with ``exit_code``; an HTTP service
    answers 4xx with both. Anything that is not a ``LinkcppError`` is an internal error.
    """

    exit_code = EXIT_ERROR

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class NotNowError(LinkcppError):
    """What stands in the way may pass by itself: the same may work later.

    A port that is taken, a disk that is full or not mounted yet, a database that still starts.
    """

    exit_code = EXIT_NOT_NOW


def error_of_system(cause: OSError, message: str, *, hint: str | None = None) -> LinkcppError:
    """Return the error to raise where the system refused something: one that passes, or not."""
    kind = NotNowError if is_passing(cause) else LinkcppError
    return kind(message, hint=hint)


def write_hint(cause: OSError, elsewhere: str) -> str:
    """Say what helps where the system refused to write, by why it did.

    ``elsewhere`` is what to do where this place will not do, like ``choose another folder``.
    """
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"Free some space, or {elsewhere}."
    if cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"Make it writable, or {elsewhere}."
    if cause.errno == errno.EISDIR:
        return f"Name a file rather than a folder, or {elsewhere}."
    return f"{elsewhere[0].upper()}{elsewhere[1:]}."


def is_passing(cause: OSError) -> bool:
    """Whether what the system refused may work later, with nothing changed here."""
    return cause.errno in _PASSING
