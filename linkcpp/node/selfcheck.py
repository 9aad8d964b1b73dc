"""Looks at this machine for ``linkcpp doctor``: what is here, what is missing, what to do."""

import asyncio
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path

from linkcpp import __version__
from linkcpp.cluster.addresses import interface_addresses
from linkcpp.cluster.candidates import Candidate, Finding
from linkcpp.cluster.config import DEFAULT_AGENT_PORT, Config, load_config, node_url
from linkcpp.cluster.mdns import open_zeroconf
from linkcpp.cluster.measure import this_machine
from linkcpp.cluster.probe import probe_node
from linkcpp.cluster.token import load_token, make_challenge, token_path
from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import cache_folder, config_folder, data_folder, state_folder
from linkcpp.common.records import Record
from linkcpp.common.settings import config_path
from linkcpp.common.units import format_bytes
from linkcpp.engine.binaries import find_engines, find_explicit_engine
from linkcpp.engine.check import check_engine, describe
from linkcpp.engine.records import Engine

_LITTLE_DISK_BYTES = 2 * 10**9
_NO_DISK_BYTES = 50 * 10**6
_LITTLE_MEMORY_BYTES = 10**9


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
    found.append(_look_at_token())
    found.append(asyncio.run(_look_at_mdns(is_wanted=config.mdns)))
    found.append(asyncio.run(look_at_agent()))
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
        return Config(), _from_error("settings", Verdict.FAIL, error)
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
            hint="Make it writable, or set LINKCPP_HOME to another folder.",
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
        raise NotADirectoryError(0, f"{folder} is no folder")
    probe = folder / f".linkcpp-probe-{make_challenge()[:16]}"
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
        return [_from_error("engine", Verdict.FAIL, error)]
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
                hint=engine.problem.hint,
            )
        )
    return observations


def _look_at_memory(engine: Engine | None, config: Config) -> Iterable[Observation]:
    try:
        record = this_machine(engine, memory_limit_bytes=config.memory_limit_bytes)
    except LinkcppError as error:
        return [_from_error("memory", Verdict.FAIL, error)]
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


def _look_at_token() -> Observation:
    try:
        load_token()
    except LinkcppError as error:
        # Without a token this machine still serves itself; a token that others read is a hole.
        verdict = Verdict.FAIL if _is_there(token_path()) else Verdict.WARN
        return _from_error("cluster token", verdict, error)
    detail = f"{token_path()}, for this user only"
    return Observation(subject="cluster token", verdict=Verdict.OK, detail=detail)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # Behind a folder that this user may not enter, for instance.
        return True


async def _look_at_mdns(*, is_wanted: bool) -> Observation:
    subject = "local network"
    addresses = [address for address in interface_addresses() if not address.is_loopback]
    if not addresses:
        return Observation(
            subject=subject,
            verdict=Verdict.WARN,
            detail="no interface but loopback is up",
            hint="Connect this machine to the network that the other machines are on.",
        )
    listed = ", ".join(str(address) for address in addresses[:4])
    if not is_wanted:
        detail = f"{listed}; mDNS is switched off in the settings"
        return Observation(subject=subject, verdict=Verdict.OK, detail=detail)
    try:
        await open_zeroconf(()).async_close()
    except LinkcppError as error:
        return _from_error(subject, Verdict.WARN, error)
    return Observation(subject=subject, verdict=Verdict.OK, detail=f"{listed}; mDNS can be used")


async def look_at_agent(port: int = DEFAULT_AGENT_PORT) -> Observation:
    """See whether this machine's node agent answers, and as what."""
    subject = f"node agent (port {port})"
    try:
        token = load_token()
    except LinkcppError:
        # Any token does to find out who answers, as only a proof is asked for.
        token = make_challenge()
    probe = await probe_node(Candidate(url=node_url("127.0.0.1", port), found_by="doctor"), token)
    if probe.finding is Finding.NO_ANSWER:
        return Observation(
            subject=subject,
            verdict=Verdict.OK,
            detail="does not run here",
            hint="Start `linkcpp node` if this machine is to give its memory to the cluster.",
        )
    if probe.health is None or probe.finding is Finding.NOT_A_NODE:
        return Observation(
            subject=subject,
            verdict=Verdict.WARN,
            detail="another program has the port",
            hint="Start `linkcpp node --port N` with a free port, or end the other program.",
        )
    detail = f"runs as {probe.health.name}, linkcpp {probe.health.agent_version}"
    if probe.finding is not Finding.NODE:
        return Observation(
            subject=subject,
            verdict=Verdict.FAIL,
            detail=f"{detail}, but {probe.detail}",
            hint="Restart `linkcpp node`: it keeps the token that it was started with.",
        )
    if probe.health.agent_version != __version__:
        return Observation(
            subject=subject,
            verdict=Verdict.WARN,
            detail=f"{detail}; this is linkcpp {__version__}",
            hint="Restart `linkcpp node`.",
        )
    return Observation(subject=subject, verdict=Verdict.OK, detail=detail)


def _from_error(subject: str, verdict: Verdict, error: LinkcppError) -> Observation:
    return Observation(subject=subject, verdict=verdict, detail=error.message, hint=error.hint)
