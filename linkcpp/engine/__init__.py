"""Stock llama.cpp programs: found, fingerprinted, checked, installed, supervised;
the ggml-RPC codec.

Imports only ``linkcpp.common``.
"""
