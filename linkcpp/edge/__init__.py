"""Both ends of an edge: one authenticated, encrypted link between a coordinator and a node.

An edge carries TCP connections to the node's agent over whatever path works: a direct WebSocket,
or a relay that sees ciphertext only. A lost path is replaced by another one without losing a byte.
From the wire upwards: ``noise`` (key exchange), ``channel`` (encrypted records), ``session``
(numbered frames that survive a lost path), ``streams`` (many byte streams in one session), ``core``
(session and streams together); all these are pure. Above them ``carrier``, ``link``, ``local`` and
``exchange`` do the I/O, ``endpoint`` is the coordinator's end and ``acceptor`` the node's.
``docs/wire.md`` has the bytes.
"""
