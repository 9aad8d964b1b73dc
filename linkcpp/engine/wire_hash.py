"""FNV-1a-64, which ggml-RPC identifies tensor data by."""

import numpy as np

from linkcpp.engine.wire import Buffer

_OFFSET_BASIS = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1
_BLOCK_BYTES = 1 << 16
_LOW_PRIME = _PRIME & 0xFF


def fnv1a_64(data: Buffer, state: int = _OFFSET_BASIS) -> int:
    """Hash ``data``, going on from ``state`` (the hash of what came before).

    The recurrence is h' = (h xor byte) * prime mod 2**64. Its xor touches the low eight bits only,
    so h xor byte = h + d, where d depends on the low byte alone. Once the low bytes are known, the
    rest is a weighted sum of the d, which numpy does in one product per block.
    http://www.isthe.com/chongo/tech/comp/fnv/
    """
    view = np.frombuffer(data, np.uint8)
    for start in range(0, len(view), _BLOCK_BYTES):
        state = _hash_block(view[start : start + _BLOCK_BYTES], state)
    return state


def _hash_block(block: "np.ndarray[tuple[int], np.dtype[np.uint8]]", state: int) -> int:
    low = _low_bytes(block, state & 0xFF)
    difference = (low ^ block).astype(np.int64) - low.astype(np.int64)
    count = len(block)
    weighted = np.dot(difference.view(np.uint64), _POWERS[_BLOCK_BYTES - count :])
    return (state * pow(_PRIME, count, 1 << 64) + int(weighted)) & _MASK


def _low_bytes(
    block: "np.ndarray[tuple[int], np.dtype[np.uint8]]", first: int
) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Return the state's low byte before each step, found bit by bit from the lowest.

    The prime is odd, so bit k of (x * prime) is bit k of x, xor what lower bits carry into it:
    with these known, bit k of the state is a running xor.
    """
    low = np.full(len(block), 0, np.uint8)
    for bit in range(8):
        lower = (low ^ block) & np.uint8((1 << bit) - 1)
        flips = ((lower * np.uint8(_LOW_PRIME)) ^ block) >> np.uint8(bit) & np.uint8(1)
        steps = np.empty_like(flips)
        steps[0] = first >> bit & 1
        steps[1:] = flips[:-1]
        low |= np.bitwise_xor.accumulate(steps) << np.uint8(bit)
    return low


def _prime_powers() -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    powers = np.full(_BLOCK_BYTES, _PRIME, np.uint64)
    return np.multiply.accumulate(powers)[::-1].copy()


_POWERS = _prime_powers()
