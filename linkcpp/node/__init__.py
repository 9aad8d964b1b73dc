"""The node agent: this machine's HTTP API, the engine processes that it runs for deployments, and
the authenticated bridge to them; and the client of that API.

Imports ``linkcpp.cluster``, ``linkcpp.engine`` and ``linkcpp.common``.
"""
