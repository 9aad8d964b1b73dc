"""Hashing a stream of bytes in pieces, each for itself."""

import hashlib
from collections.abc import Callable, Iterable, Iterator

# Gets the bytes that were just done, from any thread.
Progress = Callable[[int], None]


def hash_pieces(
    parts: Iterable[memoryview], sizes: Iterable[int], on_part: Callable[[memoryview], None]
) -> Iterator[str]:
    """Yield the SHA-256 in hex of every piece, as soon as the stream has given all of it.

    ``sizes`` says how long the pieces are; ``on_part`` sees every part of the stream before it is
    hashed. Pieces that the stream does not give wholly have no hash.
    """
    wanted = iter(sizes)
    left = next(wanted, None)
    running = hashlib.sha256()
    for part in parts:
        on_part(part)
        rest = part
        while left is not None and len(rest) >= left:
            running.update(rest[:left])
            rest = rest[left:]
            yield running.hexdigest()
            left, running = next(wanted, None), hashlib.sha256()
        if left is not None:
            running.update(rest)
            left -= len(rest)
