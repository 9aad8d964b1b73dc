"""Guessing which experts a token needs, before the backing server has told.

llama-server brings the router's logits itself. The experts of most models are simply those with
the largest, so workers can be asked at once while the backing server computes the real choice,
which is always read and compared: a wrong guess costs a second request, never a wrong row.
"""

from collections.abc import Iterable

import numpy as np

_RIGHT, _WRONG, _START, _MAX_SCORE = 1, -8, 16, 64


class Guesser:
    """Guesses for one model, layer by layer; gives up where it is wrong more than now and then."""

    def __init__(self) -> None:
        self._scores: dict[int, int] = {}

    def guess(
        self, layer: int, expert_count: int, slot_count: int, known: Iterable[bytes]
    ) -> list[int] | None:
        """Return a token's ids from the logits among what is ``known``."""
        if self._scores.get(layer, _START) <= 0:
            return None
        for data in known:
            if len(data) == 4 * expert_count:
                logits = np.frombuffer(data, np.float32)
                ids: list[int] = (-logits).argsort()[:slot_count].tolist()
                return ids
        return None

    def note(self, layer: int, was_right: bool) -> None:
        """Take note of what became of a guess."""
        score = self._scores.get(layer, _START) + (_RIGHT if was_right else _WRONG)
        self._scores[layer] = min(score, _MAX_SCORE)
