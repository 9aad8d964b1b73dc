"""Errors that a user can do something about."""


class LinkcppError(Exception):
    """An expected failure, told in one sentence with the way out.

    The command line prints ``message`` and ``hint`` and exits with code 2; an HTTP service answers
    4xx with both. Anything that is not a ``LinkcppError`` is a defect of linkcpp.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message
