"""Steps of the hub's clock: somebody set it, or the machine slept."""

from collections.abc import Callable

# What a clock that is only slewed, or a busy machine, does not make.
_MIN_STEP_SECONDS = 5.0


class ClockSteps:
    """Compares a clock that may be set with a steady one."""

    def __init__(self, clock: Callable[[], float], steady: Callable[[], float]) -> None:
        self._clock = clock
        self._steady = steady
        self._ahead = clock() - steady()

    def take(self) -> float:
        """Return by how many seconds the clock was set since the last call; below 0: set back."""
        ahead = self._clock() - self._steady()
        step = ahead - self._ahead
        if abs(step) < _MIN_STEP_SECONDS:
            return 0.0
        self._ahead = ahead
        return step


def seen_since(last_seen: float, step: float, now: float) -> float:
    """Move a time at which something was seen along with a clock that was set by ``step``. Pure.

    What was seen between the step and ``now``, by the new clock, stays.
    """
    if step > 0:
        return min(last_seen + step, now)
    return last_seen + step if last_seen > now else last_seen
