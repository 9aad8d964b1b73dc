"""How a step tells that it cannot be done."""

import contextlib
from collections.abc import Iterator

from linkcpp.cluster.records import NodeId
from linkcpp.common.errors import LinkcppError


class StepRefusedError(LinkcppError):
    """A step cannot be done because of certain nodes; without them it might."""

    def __init__(
        self, message: str, *, hint: str | None = None, nodes: frozenset[NodeId] = frozenset()
    ) -> None:
        super().__init__(message, hint=hint)
        self.nodes = nodes


class NodeMissingError(StepRefusedError):
    """Nodes that a step needs cannot be found, and none refused to talk."""


class NeverError(LinkcppError):
    """The plan cannot work as it is, however often it is tried: another model, another engine."""


@contextlib.contextmanager
def never_again() -> Iterator[None]:
    """Raise what the block cannot do as a ``NeverError``."""
    try:
        yield
    except LinkcppError as error:
        raise NeverError(error.message, hint=error.hint) from error


class BrokenError(Exception):
    """Something that was up and running is not any more; ``reason`` is a clause for people."""

    def __init__(
        self, reason: str, *, hint: str | None = None, nodes: frozenset[NodeId] = frozenset()
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.nodes = nodes
