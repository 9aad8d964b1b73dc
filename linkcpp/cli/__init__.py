"""One module a verb. A verb reads options, calls the rooms below, and prints; it decides nothing.

May import every room.
"""
