"""Expert workers: slabs in a stock rpc-server, answering (rows, experts) with rows.

``frames`` and ``chain`` are pure; ``plan`` turns a chain into graphs, ``compute`` runs them,
``service`` answers peers. Knows ``engine``'s wire and ``model``.
"""
