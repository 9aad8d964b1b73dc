"""Reads all that this machine keeps of models, for ``linkcpp doctor --deep``."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import cache_folder, data_folder
from linkcpp.common.units import format_bytes
from linkcpp.model.slices.checked import forget_checked
from linkcpp.model.slices.manifest import SUFFIX
from linkcpp.model.slices.verifying import verify_file
from linkcpp.node.diagnosis import Observation, Verdict, from_error

_HINT = "Nothing needs to be done: before it is used again, it is fetched, sent or made again."


def look_at_files(*, on_step: Callable[[str], None] = lambda _: None) -> list[Observation]:
    """Hold every slice and backbone in linkcpp's folders to its manifest, also unchanged ones.

    Blocking, as long as the disk takes. ``on_step`` hears what is read.
    """
    return summed_up("slices and backbones", map(_look(on_step), _described_files()))


def summed_up(
    subject: str, looked_at: Iterable[tuple[int, Observation | None]]
) -> list[Observation]:
    """Tell of what is wrong, or in one line how many bytes of how many files are sound."""
    found = list(looked_at)
    problems = [problem for _, problem in found if problem is not None]
    if problems or not found:
        return problems
    size = format_bytes(sum(size_bytes for size_bytes, _ in found))
    detail = f"all {len(found)} are as they were written ({size} read)"
    return [Observation(subject=subject, verdict=Verdict.OK, detail=detail)]


def _look(on_step: Callable[[str], None]) -> Callable[[Path], tuple[int, Observation | None]]:
    def look(path: Path) -> tuple[int, Observation | None]:
        on_step(str(path))
        try:
            found = verify_file(path, lambda _: None)
        except LinkcppError as error:
            return 0, from_error("damaged file", Verdict.WARN, error)
        if found.is_sound:
            return found.checked_bytes, None
        forget_checked(path)
        detail = f"{path}: {found.summary}"
        return found.checked_bytes, Observation(
            subject="damaged file", verdict=Verdict.WARN, detail=detail, hint=_HINT
        )

    return look


def _described_files() -> Iterator[Path]:
    folders = (cache_folder(), data_folder())
    for manifest in sorted(chain.from_iterable(folder.rglob(f"*{SUFFIX}") for folder in folders)):
        path = manifest.with_name(manifest.name.removesuffix(SUFFIX))
        # A slice that is being sent has its manifest first.
        if path.exists():
            yield path
