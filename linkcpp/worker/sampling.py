"""Which work is done a second time, to compare: a draw that nobody foresees. Pure.

The gaps between two pieces that are taken follow from a secret and a count alone, by a keyed hash.
So the pieces between cost nothing, and whoever is told the secret afterwards can see for himself
which pieces had to be taken.
"""

import hashlib
import math
from dataclasses import dataclass, field

DEFAULT_RATE = 0.01
SECRET_BYTES = 32
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Sampler:
    """Takes each piece of work with the probability ``rate``, whatever was taken before.

    ``left`` pieces are passed over before the next one is taken, which is draw number ``draw``.
    """

    secret: bytes = field(repr=False)
    rate: float
    draw: int
    left: int = field(repr=False)

    def take(self, count: int) -> "tuple[tuple[int, ...], Sampler]":
        """Return which of the next ``count`` pieces are taken, ascending, and the sampler after."""
        if self.left >= count:
            return (), Sampler(self.secret, self.rate, self.draw, self.left - count)
        taken = []
        draw, at = self.draw, self.left
        while at < count:
            taken.append(at)
            draw += 1
            at += 1 + gap(self.secret, draw, self.rate)
        return tuple(taken), Sampler(self.secret, self.rate, draw, at - count)


def start_sampling(secret: bytes, rate: float) -> Sampler:
    """Begin with nothing taken; ``secret`` are ``SECRET_BYTES`` that nobody else knows.

    Raises:
        ValueError: the secret is of another length, or the rate no probability.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes")
    if not 0 <= rate <= 1:
        raise ValueError(f"a rate of {rate}")
    return Sampler(secret, rate, 0, gap(secret, 0, rate))


def gap(secret: bytes, draw: int, rate: float) -> int:
    """Return how many pieces are passed over before a draw takes one: geometrically distributed."""
    if rate >= 1:
        return 0
    if rate <= 0:
        return _NEVER
    digest = hashlib.blake2b(draw.to_bytes(8, "little"), digest_size=8, key=secret).digest()
    # Above 0 and at most 1, so that it has a logarithm.
    uniform = ((int.from_bytes(digest, "little") >> 11) + 1) * 2.0**-53
    return int(min(math.log(uniform) / math.log1p(-rate), _NEVER))
