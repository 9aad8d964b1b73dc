"""Whole deployments over an internet of network namespaces: a hub on 443, homes behind NAT."""
