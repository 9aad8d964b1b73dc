"""JSON of other machines, made fit for a terminal."""

from pydantic import JsonValue

from linkcpp.common.text import printable

_MAX_TEXT_CHARACTERS = 512


def printable_json(value: JsonValue) -> JsonValue:
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
