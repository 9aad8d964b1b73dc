"""Plan + ``templates/`` -> supervised processes on every node; state and status of deployments.

Imports ``linkcpp.node`` (client), ``linkcpp.planning``, ``linkcpp.cluster``, ``linkcpp.engine``,
``linkcpp.model`` and ``linkcpp.common``.
"""
