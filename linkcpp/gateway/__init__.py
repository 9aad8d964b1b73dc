"""The gateway: a relay between two WebSockets that both sides open outwards.

It knows framing only: who may meet whom is decided by the hub's tickets, and what passes through
is opaque. ``frames``, ``pairing``, ``liveness`` and ``upgrade`` are pure; ``connection`` is one
side, ``relay`` all of them, ``registration`` the way to the hub.

A relay shares a port with any ASGI application: ``relay_http_protocol(relay)`` in ``server`` is
the class of HTTP connections for ``linkcpp.common.http_server.make_server(http=…)``; it takes
``/v1/relay`` for itself and leaves every other request and WebSocket to the application. Who stops
the server awaits ``relay.aclose()`` first.
"""
