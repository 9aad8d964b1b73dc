"""The hub's models: a catalogue on the disk, and slices, headers and hollow files as streams.

``catalogue``, ``adding``: what is kept of a model. ``library``, ``layout``: what a request is for.
``byte_ranges``, ``streaming``, ``routes``: how it is answered.
``docs/slices.md`` has the formats.
"""
