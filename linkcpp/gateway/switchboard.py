"""What a connection needs of the relay that it belongs to."""

from typing import TYPE_CHECKING, Protocol

from linkcpp.registry.relay import Hello

if TYPE_CHECKING:
    from linkcpp.gateway.connection import RelayConnection


class Switchboard(Protocol):
    """The relay, as one of its connections sees it."""

    @property
    def buffer(self) -> memoryview:
        """Where reads go, behind ``LONGEST_REST_BYTES`` of room; the same for all connections."""

    def said_hello(self, connection: "RelayConnection", hello: Hello) -> None:
        """Take a side that told who it is."""

    def ended(self, connection: "RelayConnection", code: int, reason: str) -> None:
        """Hear that a connection takes part no more; ``code`` is for its partner."""

    def closes(self, code: int) -> None:
        """Hear that a connection is closed from here."""

    def lost(self, connection: "RelayConnection") -> None:
        """Hear that a connection's socket is closed."""
