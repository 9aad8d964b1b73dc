"""GGUF models: bounded header reader, sources (file, split, HTTP Range), inventory,
presets, memory.

Imports only ``linkcpp.common``.
"""
