"""A request to a deployment's API from inside a namespace, watched while its tokens come."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """Greedy tokens, and how many calls for experts have failed since the deployment started."""

    tokens: list[Any]
    failed_call_count: int

    def first(self, count: int) -> "Answer":
        """Return what a shorter answer would be."""
        return Answer(self.tokens[:count], self.failed_call_count)


@dataclass(frozen=True)
class Asking:
    """A request under way, whose process writes a line for each token to a file."""

    process: "subprocess.Popen[str]"
    output: Path

    def token_count(self) -> int:
        """How many tokens have come."""
        return self.output.read_text().count("\n")

    def answer(self) -> Answer:
        """Wait for the whole answer."""
        self.process.wait(300)
        told = self.output.read_text()
        assert self.process.returncode == 0, told
        *tokens, failed_call_count = map(json.loads, told.splitlines())
        return Answer(tokens, failed_call_count)
