"""Whether a program that runs also lives. Pure: what was seen of it over time in, a verdict out.

An rpc-server is never asked: it serves one connection at a time, and dies when one that waits goes
away. What the system tells of a process has to do, and whether it answers, where it may be asked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

# A person who stops a program for a moment, such as with Ctrl-Z, does not lose it.
STOPPED_SECONDS = 10.0
# A server whose threads all wait for results answers nobody meanwhile, though it is well.
SILENT_SECONDS = 120.0
# Between two looks: whoever looks did not run then, so nothing is known of that time. A machine
# that slept, or had no time for anybody, makes no program a hung one.
MAX_GAP_SECONDS = 15.0
# Timers and threads that wait take that much.
_STILL_SHARE = 0.002


@dataclass(frozen=True)
class Sight:
    """A program at one moment.

    ``is_stopped``: it was stopped by a signal. ``is_silent``: it was asked and did not answer.
    """

    at_seconds: float
    cpu_seconds: float
    is_stopped: bool = False
    is_silent: bool = False


class Life(StrEnum):
    """What is to be thought of a program."""

    FINE = "fine"
    SUSPECT = "suspect"
    HUNG = "hung"


@dataclass(frozen=True)
class Verdict:
    """A verdict, and in a clause why the program counts as hung."""

    life: Life
    reason: str = ""


def judge(sights: Sequence[Sight]) -> Verdict:
    """Judge a program by what was seen of it, the oldest first."""
    seen = _since_the_last_gap(sights)
    stopped = _lasting(seen, lambda sight: sight.is_stopped)
    silent = _lasting(seen, lambda sight: sight.is_silent)
    if (seconds := _duration(stopped)) >= STOPPED_SECONDS:
        return Verdict(Life.HUNG, f"a signal stopped it {seconds:.0f} s ago")
    if (seconds := _duration(silent)) >= SILENT_SECONDS and _is_still(silent):
        return Verdict(Life.HUNG, f"it has neither answered nor computed for {seconds:.0f} s")
    return Verdict(Life.SUSPECT if stopped or silent else Life.FINE)


def _since_the_last_gap(sights: Sequence[Sight]) -> Sequence[Sight]:
    for index in range(len(sights) - 1, 0, -1):
        if sights[index].at_seconds - sights[index - 1].at_seconds > MAX_GAP_SECONDS:
            return sights[index:]
    return sights


def _lasting(sights: Sequence[Sight], is_so: Callable[[Sight], bool]) -> Sequence[Sight]:
    """Return the sights at the end of which something is so."""
    first = next((i + 1 for i in reversed(range(len(sights))) if not is_so(sights[i])), 0)
    return sights[first:]


def _duration(sights: Sequence[Sight]) -> float:
    return sights[-1].at_seconds - sights[0].at_seconds if sights else 0.0


def _is_still(sights: Sequence[Sight]) -> bool:
    used = sights[-1].cpu_seconds - sights[0].cpu_seconds
    return used <= _STILL_SHARE * _duration(sights)
