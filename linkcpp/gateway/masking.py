"""Memory that a connection is read into, and the mask of RFC 6455 taken off there. Pure.

The mask comes off in place, eight bytes at a time: the bytes are touched once, while they are still
in the processor's cache, and then go out from where they came in.
"""

from typing import Final

import numpy as np

# Before what is read: the rest of the read before it (at most a whole short frame, 14 + 125 bytes),
# or the head that a piece goes out with.
HEADROOM_BYTES: Final = 160
_WORD_BYTES: Final = 8


class ReadBuffer:
    """``size_bytes`` of memory to read into, behind a headroom."""

    def __init__(self, size_bytes: int) -> None:
        whole_words = -(-(HEADROOM_BYTES + size_bytes) // _WORD_BYTES)
        raw = bytearray(whole_words * _WORD_BYTES)
        self.view: Final = memoryview(raw)
        self.space: Final = self.view[HEADROOM_BYTES : HEADROOM_BYTES + size_bytes]
        self._words: Final = np.frombuffer(raw, np.dtype("<u8"))

    def unmask(self, start: int, end: int, key: int, offset: int) -> None:
        """Take the mask off ``view[start:end]``.

        ``key`` is the masking key, its first byte the lowest; ``offset`` is how many bytes of the
        frame's payload came before ``start``.
        """
        if key == 0 or start == end:
            return
        shift = (offset - start) % 4 * 8
        turned = (key >> shift | key << 32 - shift) & 0xFFFFFFFF
        first, beyond = start // _WORD_BYTES, -(-end // _WORD_BYTES)
        # Whole words are turned over; what of them is not payload is put back.
        head = self.view[first * _WORD_BYTES : start].tobytes()
        tail = self.view[end : beyond * _WORD_BYTES].tobytes()
        words = self._words[first:beyond]
        np.bitwise_xor(words, np.uint64(turned << 32 | turned), out=words)
        self.view[first * _WORD_BYTES : start] = head
        self.view[end : beyond * _WORD_BYTES] = tail
