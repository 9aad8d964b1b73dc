"""JSON of other machines, made fit for a terminal."""

from pydantic import JsonValue

from linkcpp.common.text import printable

_LONGEST_TEXT = 512


def printable_json(value: JsonValue) -> JsonValue:
    """Make every string in a JSON value ``printable``, keys included."""
    if isinstance(value, str):
        return printable(value, _LONGEST_TEXT)
    if isinstance(value, list):
        return [printable_json(item) for item in value]
    if isinstance(value, dict):
        return {printable(key, _LONGEST_TEXT): printable_json(item) for key, item in value.items()}
    return value
