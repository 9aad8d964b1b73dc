"""What every room shares: user errors, byte units, record base, safe files, per-user folders.

Imports nothing of linkcpp.
"""
