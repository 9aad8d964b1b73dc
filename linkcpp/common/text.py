"""Text from outside (file names, headers, other machines), made fit for a terminal."""

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Every start of `linkcpp` imports this module, and pydantic takes long to import.
    from pydantic import JsonValue

MAX_NAME_CHARACTERS = 64
_MAX_TEXT_CHARACTERS = 512


def did_you_mean(word: str, known: Iterable[str], *, form: str = "{}") -> str:
    """Ask ``Did you mean …? `` for the nearest known word, in a form; empty where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {form.format(near[0])}? " if near else ""


def shell_command(*words: str | Path) -> str:
    """Write a command so that it can be copied into a shell, whatever its paths have in them."""
    return shlex.join(str(word) for word in words)


def printable(text: str, limit: int = MAX_NAME_CHARACTERS) -> str:
    """Replace what is not printable (escape sequences, line ends, bidi marks) and cut to ``limit``.

    Names come from peers that may be hostile: an escape sequence in one would reach the terminal.
    """
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return cut if cut.isprintable() else "".join(map(_shown, cut))


def printable_json(value: "JsonValue") -> "JsonValue":
    """Make every string in a JSON value ``printable``, keys included."""
    if isinstance(value, str):
        return printable(value, _MAX_TEXT_CHARACTERS)
    if isinstance(value, list):
        return [printable_json(item) for item in value]
    if isinstance(value, dict):
        return {
            printable(key, _MAX_TEXT_CHARACTERS): printable_json(item)
            for key, item in value.items()
        }
    return value


def printable_lines(text: str) -> str:
    """Replace the same but line ends and tabs, and cut nothing: for text of many lines."""
    if text.isprintable():
        return text
    return "".join(char if char in "\n\t" else _shown(char) for char in text)


def _shown(char: str) -> str:
    return char if char.isprintable() else "\N{REPLACEMENT CHARACTER}"
