"""How a running deployment compares with one process that has the whole model.

``statistics`` is pure; ``generation`` asks llama-server, ``reference`` runs the whole model,
``rows`` asks the virtual device about its workers, ``run`` does it all.
"""
