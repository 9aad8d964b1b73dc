"""Looks at this machine for ``linkcpp doctor``: what is here, what is missing, what to do."""

import asyncio
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from linkcpp import __version__
from linkcpp.cluster.config import Config, load_config
from linkcpp.cluster.measure import this_machine
from linkcpp.common.config_file import config_path
from linkcpp.common.errors import LinkcppError, write_hint
from linkcpp.common.paths import cache_folder, config_folder, data_folder, state_folder
from linkcpp.common.units import format_bytes
from linkcpp.engine.binaries import find_engines, find_explicit_engine
from linkcpp.engine.check import check_engine, describe, hint_for
from linkcpp.engine.records import Engine
from linkcpp.model.slices.checked import forget_checked
from linkcpp.model.slices.manifest import SUFFIX
from linkcpp.model.slices.verifying import verify_file
from linkcpp.node.diagnosis import Diagnosis, Observation, Verdict, from_error
from linkcpp.node.selfcheck_network import look_at_network

_LITTLE_DISK_BYTES = 2 * 10**9
_NO_DISK_BYTES = 50 * 10**6
_LITTLE_MEMORY_BYTES = 10**9
_DAMAGE_HINT = (
    "Nothing needs to be done: before it is used again, it is fetched, sent or made again."
)


def examine(*, on_step: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Look at everything; takes a few seconds, mostly to run the engines.

    Blocking, and not to be called where an event loop runs. ``on_step`` hears what is looked at.
    """
    on_step("settings and folders")
    config, settings = _look_at_settings()
    found = [*_look_at_programs(), settings, *look_at_folders()]
    engines: list[Engine] = []
    on_step("engines")
    found += _look_at_engines(engines, on_step)
    on_step("memory")
    chosen = next((engine for engine in engines if engine.problem is None), None)
    found += _look_at_memory(chosen, config)
    on_step("network")
    found += asyncio.run(look_at_network(uses_mdns=config.mdns))
    return Diagnosis(observations=tuple(found))


def _look_at_programs() -> Iterable[Observation]:
    yield Observation(
        subject="Python",
        verdict=Verdict.OK,
        detail=f"{platform.python_version()} at {sys.executable}",
    )
    yield Observation(
        subject="linkcpp",
        verdict=Verdict.OK,
        detail=f"{__version__} on {platform.system()} {platform.machine()}",
    )


def _look_at_settings() -> tuple[Config, Observation]:
    path = config_path()
    try:
        config = load_config()
    except LinkcppError as error:
        return Config(), from_error("settings", Verdict.FAIL, error)
    detail = str(path) if path.exists() else f"the defaults ({path} would change them)"
    return config, Observation(subject="settings", verdict=Verdict.OK, detail=detail)


def look_at_folders() -> list[Observation]:
    """See whether linkcpp's folders can be written, and have room."""
    folders = {
        "state folder": state_folder(),
        "settings folder": config_folder(),
        "cache folder": cache_folder(),
        "engines folder": data_folder(),
    }
    return [_look_at_folder(subject, folder) for subject, folder in folders.items()]


def _look_at_folder(subject: str, folder: Path) -> Observation:
    try:
        existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        _try_to_write(existing)
        free_bytes = shutil.disk_usage(existing).free
    except OSError as error:
        return Observation(
            subject=subject,
            verdict=Verdict.FAIL,
            detail=f"{folder} cannot be written: {error.strerror or error}",
            hint=write_hint(error, "set LINKCPP_HOME to another folder"),
        )
    detail = f"{folder}, {format_bytes(free_bytes)} free"
    if free_bytes >= _LITTLE_DISK_BYTES:
        return Observation(subject=subject, verdict=Verdict.OK, detail=detail)
    return Observation(
        subject=subject,
        verdict=Verdict.FAIL if free_bytes < _NO_DISK_BYTES else Verdict.WARN,
        detail=detail,
        hint="Free some space: logs, engines and model slices are kept there.",
    )


def _try_to_write(folder: Path) -> None:
    # Asked by doing: permission bits tell nothing of a read-only disk, or of a full one.
    if not folder.is_dir():
        raise NotADirectoryError(0, f"{folder} is not a folder")
    probe = folder / f".linkcpp-probe-{secrets.token_hex(8)}"
    try:
        probe.write_bytes(b"linkcpp")
    finally:
        probe.unlink(missing_ok=True)


def _look_at_engines(
    engines: list[Engine], on_step: Callable[[str], None]
) -> Iterable[Observation]:
    try:
        named = find_explicit_engine()
        locations = [named] if named else find_engines()
        for location in locations:
            on_step(f"engine {describe(location)}")
            engines.append(check_engine(location))
    except LinkcppError as error:
        return [from_error("engine", Verdict.FAIL, error)]
    if not engines:
        return [
            Observation(
                subject="engine",
                verdict=Verdict.FAIL,
                detail="there are no llama.cpp programs on this machine",
                hint="Run `linkcpp engine install`.",
            )
        ]
    return judge_engines(engines)


def judge_engines(engines: Iterable[Engine]) -> list[Observation]:
    """Judge the engines: one that fails is a failure only where no other works."""
    engines = list(engines)
    has_good = any(engine.problem is None for engine in engines)
    refused = [(engine.location, engine.problem) for engine in engines if engine.problem]
    observations = []
    for engine in engines:
        name = describe(engine.location)
        if engine.problem is None:
            label = engine.fingerprint.label if engine.fingerprint else "unknown build"
            detail = f"{name}: works ({label})"
            observations.append(Observation(subject="engine", verdict=Verdict.OK, detail=detail))
            continue
        observations.append(
            Observation(
                subject="engine",
                verdict=Verdict.WARN if has_good else Verdict.FAIL,
                detail=f"{name}: {engine.problem.message}",
                hint=hint_for([(engine.location, engine.problem), *refused]),
            )
        )
    return observations


def _look_at_memory(engine: Engine | None, config: Config) -> Iterable[Observation]:
    try:
        record = this_machine(engine, memory_limit_bytes=config.memory_limit_bytes)
    except LinkcppError as error:
        return [from_error("memory", Verdict.FAIL, error)]
    observations = []
    for device in record.devices:
        is_little = device.offered_bytes < _LITTLE_MEMORY_BYTES
        observations.append(
            Observation(
                subject=f"device {device.name}",
                verdict=Verdict.WARN if is_little else Verdict.OK,
                detail=f"{device.description}: {format_bytes(device.offered_bytes)} to offer "
                f"of {format_bytes(device.total_bytes)}",
                hint="Close what takes the memory, or raise `memory_limit`." if is_little else None,
            )
        )
    return observations


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
            subject="damaged file", verdict=Verdict.WARN, detail=detail, hint=_DAMAGE_HINT
        )

    return look


def _described_files() -> Iterator[Path]:
    folders = (cache_folder(), data_folder())
    for manifest in sorted(chain.from_iterable(folder.rglob(f"*{SUFFIX}") for folder in folders)):
        path = manifest.with_name(manifest.name.removesuffix(SUFFIX))
        # A slice that is being sent has its manifest first.
        if path.exists():
            yield path
