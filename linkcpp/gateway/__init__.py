"""The relay: two outbound WebSockets meet here, and opaque bytes pass between them.

Framing only. What the bytes mean is for the two ends of the edge (``linkcpp.edge``).
"""
