"""The keys of the API, as their file holds them."""

from pathlib import Path

from linkcpp.common.errors import LinkcppError


def read_api_key(path: Path) -> str:
    """Return the first key of a key file (one a line, ``#`` starts a comment).

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
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            return line.strip()
    raise LinkcppError(f"The API key file {path} holds no key.", hint=hint)
