"""The hub: an HTTP service over a SQL database where machines behind address translations meet.

It knows who joined, who is alive, what they hold and which gateways there are, and it hands out
tokens and edges. ``app.py`` is the API (``linkcpp.registry.records`` lists its calls).
"""
