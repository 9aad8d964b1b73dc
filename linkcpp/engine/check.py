"""Check an engine by running it on a tiny model, and choose the best one of this machine."""

import contextlib
import fcntl
import hashlib
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from linkcpp import __version__
from linkcpp.common.cache import read_kept, write_kept
from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import file_state
from linkcpp.common.paths import cache_folder
from linkcpp.common.records import Record
from linkcpp.common.text import printable
from linkcpp.engine.binaries import find_engines, find_explicit_engine
from linkcpp.engine.cpu_features import cpu_flags, usable_features
from linkcpp.engine.fingerprint import (
    read_compiled_features,
    read_devices,
    read_fingerprint,
    require_llama_server,
)
from linkcpp.engine.probe import EngineProblemFound
from linkcpp.engine.problems import (
    ANOTHER_BUILD,
    BUILD_HERE,
    ProblemCode,
    name_features,
    no_rpc,
    too_old,
    unknown_protocol,
)
from linkcpp.engine.records import (
    Engine,
    EngineDevice,
    EngineFeatures,
    EngineFingerprint,
    EngineLocation,
    EngineProblem,
    RpcVersion,
)
from linkcpp.engine.sources import way_to_another_build
from linkcpp.engine.trial import run_trial
from linkcpp.engine.wire import WireError, dialect_of

# Longer than a check takes at worst (``TrialLimits``, ``fingerprint``).
_MAX_WAIT_SECONDS = 180.0
_POLL_SECONDS = 0.05
_MAX_PATH_CHARACTERS = 4096


class _StoredCheck(Record):
    """A check that found no problem, and what it was made on."""

    stamp: str
    engine: Engine


def check_engine(location: EngineLocation, *, refresh: bool = False) -> Engine:
    """Fingerprint an engine and run it for real; takes about a second, or a few with a GPU.

    Blocking: call it through ``asyncio.to_thread`` from a service. A check that found no problem
    is remembered until a program or a library of the engine changes; the free memory of ``devices``
    is of this moment all the same. One that found a problem is made again each time, since the way
    out mostly lies outside the engine. Processes and threads that check the same engine at the same
    time wait for one check.

    Raises:
        LinkcppError: the cache folder cannot be written.
    """
    stored = cache_folder() / "engines" / f"{_identity(location)}.json"
    stamp = _stamp(location)
    if not refresh and (engine := _load(stored, stamp, location)):
        return engine
    with _sole_check(stored):
        # Another process may have checked it while this one waited.
        if not refresh and (engine := _load(stored, stamp, location)):
            return engine
        engine = examine_engine(location)
        if engine.problem is None:
            write_kept(stored, _StoredCheck(stamp=stamp, engine=engine).model_dump_json())
        return engine


def choose_engine(explicit: Path | None = None) -> Engine:
    """Give the most preferred engine that works; one that is named explicitly, or no other.

    Blocking, like ``check_engine``.

    Raises:
        LinkcppError: none works; what was found and why not, and the way out.
    """
    named = find_explicit_engine(explicit)
    refused: list[tuple[EngineLocation, EngineProblem]] = []
    for location in [named] if named else find_engines():
        engine = check_engine(location)
        if engine.problem is None:
            return engine
        refused.append((location, engine.problem))
    if not refused:
        raise LinkcppError(
            "There are no llama.cpp programs on this machine.",
            hint="Run `linkcpp engine install`, or set LINKCPP_ENGINE to their folder.",
        )
    found = " ".join(f"{describe(location)}: {problem.message}" for location, problem in refused)
    raise LinkcppError(f"No engine works here. {found}", hint=hint_for(refused))


def hint_for(refused: Sequence[tuple[EngineLocation, EngineProblem]]) -> str:
    """Give the hint for the first engine; where that is another build, one of none that fails."""
    location, problem = refused[0]
    for built_here in (True, False):
        if problem.hint == way_to_another_build([location], built_here=built_here):
            everywhere = [location for location, _ in refused]
            return way_to_another_build(everywhere, built_here=built_here)
    return problem.hint


def describe(location: EngineLocation) -> str:
    """Name an engine in a few words: its package, or its folder."""
    if location.package:
        return f"{location.package} {location.package_version}"
    program = location.llama_server or location.rpc_server
    return printable(str(program.parent), _MAX_PATH_CHARACTERS) if program else location.found_by


def examine_engine(location: EngineLocation) -> Engine:
    """Fingerprint an engine and run it for real, whatever was found before. Blocking."""
    fingerprint: EngineFingerprint | None = None
    devices: tuple[EngineDevice, ...] = ()
    try:
        server = require_llama_server(location)
        fingerprint = read_fingerprint(location, None)
        devices = read_devices(location)
        problem = _feature_problem(server, location.rpc_server, fingerprint.features)
    except EngineProblemFound as found:
        problem = found.problem
    else:
        if problem is None and location.rpc_server is not None:
            trial = run_trial(location, server, location.rpc_server)
            fingerprint = fingerprint.model_copy(update={"rpc_version": trial.rpc_version})
            # The protocol last, as a build that does not run at all is the graver finding.
            problem = trial.problem or _protocol_problem(trial.rpc_version)
    if problem is not None:
        problem = _told_exactly(problem, location)
    return Engine(location=location, fingerprint=fingerprint, devices=devices, problem=problem)


def _told_exactly(problem: EngineProblem, location: EngineLocation) -> EngineProblem:
    """Name the CPU features that are missing, and a way out that is not this very build."""
    if problem.code == ProblemCode.ILLEGAL_INSTRUCTION:
        compiled = read_compiled_features(location)
        usable = usable_features()
        if compiled and usable is not None:
            problem = name_features(problem, compiled - usable)
    if problem.hint in (ANOTHER_BUILD, BUILD_HERE):
        hint = way_to_another_build([location], built_here=problem.hint == BUILD_HERE)
        problem = problem.model_copy(update={"hint": hint})
    return problem


def _feature_problem(
    server: Path, rpc_server: Path | None, features: EngineFeatures
) -> EngineProblem | None:
    if rpc_server is None:
        reason = f"There is a {server.name} in {server.parent}, but no ggml-rpc-server beside it."
        return no_rpc(reason)
    if not features.rpc:
        return no_rpc(f"This {server.name} does not know --rpc: it was built without RPC.")
    needed = {
        "--override-tensor": features.override_tensor,
        "--no-repack": features.no_repack,
        "--fit": features.fit,
    }
    missing = [option for option, is_known in needed.items() if not is_known]
    if missing:
        return too_old(f"This {server.name} is too old: it does not know {', '.join(missing)}.")
    return None


def _protocol_problem(version: RpcVersion | None) -> EngineProblem | None:
    if version is None:
        return no_rpc("The rpc-server did not tell its protocol version.")
    try:
        dialect_of(version)
    except WireError as error:
        return unknown_protocol(error.message)
    return None


def _identity(location: EngineLocation) -> str:
    programs = [str(location.llama_server), str(location.rpc_server)]
    return hashlib.sha256(json.dumps(programs).encode()).hexdigest()[:24]


def _stamp(location: EngineLocation) -> str:
    """Sum up all that a check depends on: linkcpp, this machine, every program and library."""
    files = [path for path in (location.llama_server, location.rpc_server) if path is not None]
    for folder in location.library_folders:
        files += sorted(path for path in folder.glob("*") if path.name.startswith("lib"))
    seen: list[object] = [__version__, platform.node(), platform.machine(), platform.release()]
    # A virtual machine may wake up on another CPU.
    seen.append(sorted(cpu_flags()))
    for path in files:
        with contextlib.suppress(OSError):
            seen.append([str(path), str(path.resolve()), *file_state(path)])
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def _load(stored: Path, stamp: str, location: EngineLocation) -> Engine | None:
    try:
        check = _StoredCheck.model_validate_json(read_kept(stored) or b"")
    except ValidationError:
        # Absent, damaged, or of another version: it is made again.
        return None
    if check.stamp != stamp:
        return None
    try:
        devices = read_devices(location)
    except EngineProblemFound:
        return None
    if [device.name for device in devices] != [device.name for device in check.engine.devices]:
        # A graphics card or its driver came or went.
        return None
    return check.engine.model_copy(update={"location": location, "devices": devices})


@contextlib.contextmanager
def _sole_check(stored: Path) -> Iterator[None]:
    try:
        stored.parent.mkdir(parents=True, exist_ok=True)
        lock = stored.with_suffix(".lock").open("w")
    except OSError as error:
        raise LinkcppError(
            f"Cannot write to {stored.parent}: {error.strerror or error}.",
            hint="Make it writable, or set LINKCPP_HOME to another folder.",
        ) from error
    with lock:
        # The lock only saves doing the same twice, and whoever holds it may be suspended (Ctrl-Z).
        ends = time.monotonic() + _MAX_WAIT_SECONDS
        while time.monotonic() < ends:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)
        yield
