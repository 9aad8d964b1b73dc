"""Clients of nodes, whatever way leads to each."""

from linkcpp.cluster.token import load_token
from linkcpp.common.errors import LinkcppError
from linkcpp.node.client import NodeClient, WrongTokenError


class Reach:
    """Opens clients; what they share ends with ``aclose``."""

    async def open(self, url: str, *, timeout_seconds: float = 10.0) -> NodeClient:
        """Make the client of the node at ``url``; the caller closes it.

        Raises:
            WrongTokenError: this machine has no cluster token.
        """
        return NodeClient(url, _cluster_token(), timeout_seconds=timeout_seconds)

    async def aclose(self) -> None:
        """Close what the clients share."""


def _cluster_token() -> str:
    try:
        return load_token()
    except LinkcppError as error:
        raise WrongTokenError(error.message, hint=error.hint, code="no_token") from error
