"""Slices of a model: the bytes of chosen experts in one file, or all but the experts' bytes.

``segments`` and ``layout`` are pure; ``copying``, ``journal`` and ``writing`` do I/O.
The formats are in ``docs/slices.md``.
"""
