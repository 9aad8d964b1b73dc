"""How verbs print: tables and progress for people, JSON for programs."""

import json
from typing import Any

from pydantic import BaseModel
from rich.console import Console


def console() -> Console:
    """Give the console for results, on stdout."""
    return Console(highlight=False)


def status_console() -> Console:
    """Give the console for progress and remarks, on stderr, so that stdout stays data."""
    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """Print records, or plain data with records in it, as JSON and nothing else."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
