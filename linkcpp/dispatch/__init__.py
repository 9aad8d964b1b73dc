"""The virtual device: a ggml-RPC server for llama-server whose experts live elsewhere.

``graph`` and ``routing`` are pure; ``memory`` maps what llama-server allocates to what exists,
``holders`` links to workers, ``experts`` gives each pair to a holder, ``device`` serves.
"""
