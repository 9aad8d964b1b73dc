"""Fixtures of the tests of weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.weights.small_hub import SmallHub, add
from tests.support.models import qwen3moe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A catalogue with one model, ``m``."""
    add(tmp_path / "models", qwen3moe())
    return tmp_path / "models"


@pytest.fixture
def hub(folder: Path) -> Iterator[SmallHub]:
    with SmallHub(folder) as running:
        yield running
