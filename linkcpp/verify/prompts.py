"""Prompts to compare runs on: those that ship with linkcpp, or a file's."""

import json
from pathlib import Path

from linkcpp.common.errors import LinkcppError

MAX_FILE_BYTES = 4 * 2**20
_SHIPPED = Path(__file__).with_name("prompts.json")


def load_prompts(path: Path | None = None) -> tuple[str, ...]:
    """Read prompts: a JSON list of texts, or a text file with one prompt a line.

    Raises:
        LinkcppError: the file cannot be read, is too large, or has no prompt.
    """
    path = path or _SHIPPED
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise LinkcppError(f"{path} is too large for a file of prompts.", hint="Take fewer.")
        prompts = _parse(content.decode("utf-8"), is_json=path.suffix == ".json")
    except OSError as error:
        raise LinkcppError(
            f"Cannot read the prompts {path}: {error.strerror or error}.",
            hint="Name a file with one prompt a line, or a JSON list of texts.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise LinkcppError(
            f"{path} is no file of prompts: {error}.",
            hint="Write one prompt a line, or a JSON list of texts, in UTF-8.",
        ) from error
    if not prompts:
        raise LinkcppError(f"{path} has no prompt.", hint="Write at least one.")
    return prompts


def _parse(text: str, *, is_json: bool) -> tuple[str, ...]:
    if not is_json:
        return tuple(line for line in text.splitlines() if line.strip())
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(item, str) and item for item in found):
        raise ValueError("it is not a list of texts")
    return tuple(found)
