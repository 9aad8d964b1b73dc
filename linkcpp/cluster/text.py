"""Text of other machines, made fit for a terminal."""

from pydantic import JsonValue

LONGEST_NAME = 64
_LONGEST_TEXT = 512


def printable(text: str, limit: int = LONGEST_NAME) -> str:
    """Replace what is not printable (escape sequences, line ends, bidi marks) and cut to ``limit``.

    Names come from peers that may be hostile: an escape sequence in one would reach the terminal.
    """
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cut)


def printable_json(value: JsonValue) -> JsonValue:
    """Make every string in a JSON value ``printable``, keys included."""
    if isinstance(value, str):
        return printable(value, _LONGEST_TEXT)
    if isinstance(value, list):
        return [printable_json(item) for item in value]
    if isinstance(value, dict):
        return {printable(key, _LONGEST_TEXT): printable_json(item) for key, item in value.items()}
    return value
