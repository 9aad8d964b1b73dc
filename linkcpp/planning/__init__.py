"""Placement: (model inventory, cluster, options) -> Plan, or why not. Pure: no I/O, no clock.

Imports the records of ``linkcpp.model``, ``linkcpp.cluster`` and ``linkcpp.engine``, and
``linkcpp.common``.
"""
