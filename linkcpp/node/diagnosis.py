"""What ``linkcpp doctor`` tells of this machine, as records."""

from enum import StrEnum

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record


class Verdict(StrEnum):
    """Whether something is as it should be: ``warn`` may be meant so, ``fail`` cannot work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Observation(Record):
    """One thing that was looked at; ``hint`` is the way out where it is not ``ok``."""

    subject: str
    verdict: Verdict
    detail: str
    hint: str | None = None


class Diagnosis(Record):
    """All that was looked at."""

    observations: tuple[Observation, ...]

    @property
    def has_failure(self) -> bool:
        """Whether anything cannot work as it is."""
        return any(item.verdict is Verdict.FAIL for item in self.observations)


def from_error(subject: str, verdict: Verdict, error: LinkcppError) -> Observation:
    """Tell of a failure in its own words."""
    return Observation(subject=subject, verdict=verdict, detail=error.message, hint=error.hint)
