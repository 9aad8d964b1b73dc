"""Nodes: their records, discovery (mDNS, URLs), measurements, the cluster token.

Imports ``linkcpp.engine`` (fingerprints) and ``linkcpp.common``.
"""
