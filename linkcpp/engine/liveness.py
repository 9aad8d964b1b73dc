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
class LivenessSample:
    """A program at one moment.

    ``is_stopped``: it was stopped by a signal. ``is_silent``: it was asked and did not answer.
    """

    at_seconds: float
    cpu_seconds: float
    is_stopped: bool = False
    is_silent: bool = False


class Liveness(StrEnum):
    """What is to be thought of a program."""

    FINE = "fine"
    SUSPECT = "suspect"
    HUNG = "hung"


@dataclass(frozen=True)
class Verdict:
    """A verdict, and in a clause why the program counts as hung."""

    liveness: Liveness
    reason: str = ""


def judge(samples: Sequence[LivenessSample]) -> Verdict:
    """Judge a program by what was seen of it, the oldest first."""
    seen = _since_the_last_gap(samples)
    stopped = _lasting(seen, lambda sample: sample.is_stopped)
    silent = _lasting(seen, lambda sample: sample.is_silent)
    if (seconds := _duration(stopped)) >= STOPPED_SECONDS:
        return Verdict(Liveness.HUNG, f"a signal stopped it {seconds:.0f} s ago")
    if (seconds := _duration(silent)) >= SILENT_SECONDS and _is_still(silent):
        return Verdict(Liveness.HUNG, f"it has neither answered nor computed for {seconds:.0f} s")
    return Verdict(Liveness.SUSPECT if stopped or silent else Liveness.FINE)


def _since_the_last_gap(samples: Sequence[LivenessSample]) -> Sequence[LivenessSample]:
    for index in range(len(samples) - 1, 0, -1):
        if samples[index].at_seconds - samples[index - 1].at_seconds > MAX_GAP_SECONDS:
            return samples[index:]
    return samples


def _lasting(
    samples: Sequence[LivenessSample], is_so: Callable[[LivenessSample], bool]
) -> Sequence[LivenessSample]:
    """Return the samples at the end of which something is so."""
    first = next((i + 1 for i in reversed(range(len(samples))) if not is_so(samples[i])), 0)
    return samples[first:]


def _duration(samples: Sequence[LivenessSample]) -> float:
    return samples[-1].at_seconds - samples[0].at_seconds if samples else 0.0


def _is_still(samples: Sequence[LivenessSample]) -> bool:
    used = samples[-1].cpu_seconds - samples[0].cpu_seconds
    return used <= _STILL_SHARE * _duration(samples)
