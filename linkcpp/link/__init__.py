"""Both ends of a link: one authenticated, encrypted connection between two machines.

A link carries byte streams over whatever path works: a direct WebSocket, or a relay that sees
ciphertext only. A lost path is replaced by another one without losing a byte. From the wire
upwards: ``noise`` (key exchange and ciphers), ``session`` (numbered frames that survive a lost
path), ``streams`` (many byte streams in one session), ``core`` (both together), and ``choosing``
(which path is better) are pure. ``transport`` (WebSockets), ``handshake``, ``channel`` (one
encrypted channel), ``tcp_handler`` (one TCP connection) and ``pump`` (a session with its
connections) do the I/O of both ends. The coordinator's end is ``endpoint``, with ``offers`` and
``supply`` (what the hub tells), ``dialing`` and ``paths``; the node's is ``acceptor``, with
``accepted`` (one edge).
Two programs whose threads block have links of their own: ``introduced`` dials, ``program`` accepts,
with ``blocking`` (a stream) over ``shared_loop``.
``docs/wire.md`` has the bytes.
"""
