"""The virtual device: a ggml-RPC server for llama-server whose experts live elsewhere.

``graph`` and ``routing`` are pure; ``memory`` maps what llama-server allocates to what exists,
``holders`` links to who holds experts: workers behind frames (``worker_holder``), and rpc-servers
of this machine that are driven from here (``server_holder``); ``experts`` gives each pair to a
holder, ``device`` serves.
"""
