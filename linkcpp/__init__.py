"""linkcpp: a control plane for stock llama.cpp over many machines.

Rooms, from top to bottom (a room imports only from rooms below it; checked in CI):
``cli``, ``verify``, ``launch``, ``front``, ``dispatch``, ``hub`` and ``node``, ``link`` and
``gateway``, ``registry``, ``worker``, ``planning``, ``cluster``, ``engine`` and ``model``,
``common``.
``docs/architecture.md`` shows one request's way through them.
"""

__version__ = "0.1.0"
