"""How a running dispatch process is asked."""

from linkcpp.common.records import Record


class ControlAccess(Record):
    """Where on loopback the control endpoint listens, and what lets in; for the owner only."""

    port: int
    token: str
