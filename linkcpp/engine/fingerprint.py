"""Tell what build an engine is: build number, commit, versions, devices, options it knows."""

import re
from pathlib import Path

from linkcpp.engine.cpu_features import compiled_features
from linkcpp.engine.probe import EngineProblemFound, ProbeResult, run_program
from linkcpp.engine.problems import missing_program, problem_of_exit
from linkcpp.engine.records import (
    EngineDevice,
    EngineFeatures,
    EngineFingerprint,
    EngineLocation,
    RpcVersion,
)

# Drivers of some devices take seconds to start the first time.
_DEADLINE_SECONDS = 20.0
# A device that no machine has: asked for it, an rpc-server lists those that there are, and ends.
_NO_SUCH_DEVICE = "linkcpp-lists-devices"
_NO_SUCH_MODEL = "/dev/null/linkcpp-lists-features"

# "version: 10068 (571d0d5)", and since 2026 "version: 0.5.0-dev (build 10068, commit 571d0d5)".
_VERSION = re.compile(r"^version: (\d+) \(([^)]*)\)", re.MULTILINE)
_LONG_VERSION = re.compile(r"^version: \S+ \(build (\d+), commit ([^)]*)\)", re.MULTILINE)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_DEVICE = re.compile(r"^\s*(\S+): (.*) \((\d+) MiB, (\d+) MiB free\)\s*$", re.MULTILINE)
_GGML_LIBRARY = re.compile(r"libggml-base(?:\.so)?\.(\d+\.\d+\.\d+)(?:\.dylib)?")
_PACKAGE_BUILD = re.compile(r"(?:0\.)?(\d{4,6})(?:\.|$)")
_FOLDER_BUILD = re.compile(r"llama-b(\d{4,6})(?:-|$)")
_MEBIBYTE = 2**20


def read_fingerprint(location: EngineLocation, rpc_version: RpcVersion | None) -> EngineFingerprint:
    """Ask the engine's llama-server what it is; ``rpc_version`` comes from HELLO (``check``).

    Raises:
        EngineProblemFound: there is no llama-server, or it does not even answer ``--version``.
    """
    server = require_llama_server(location)
    said = _answer(location, server, "--version").output
    build, commit, is_modified = parse_version(said)
    return EngineFingerprint(
        build=_best_build(location, server, build),
        commit=commit,
        ggml_version=ggml_version(location),
        rpc_version=rpc_version,
        features=parse_features(_answer(location, server, "--help").output),
        is_stock=not is_modified,
    )


def read_devices(location: EngineLocation) -> tuple[EngineDevice, ...]:
    """List the devices that the engine can compute on, with their memory at this moment.

    The rpc-server's own list has every device, the CPU included; llama-server's leaves the CPU
    out, so it is asked only where there is no rpc-server. A ``BLAS`` device has no memory of its
    own (0 bytes).

    Raises:
        EngineProblemFound: the program does not run.
    """
    if location.rpc_server is not None:
        probe = ("--device", _NO_SUCH_DEVICE)
        result = run_program(
            location, location.rpc_server, probe, deadline_seconds=_DEADLINE_SECONDS
        )
        if devices := parse_devices(result.output):
            return devices
        if result.returncode < 0 or result.returncode == 127:
            problem = problem_of_exit(location.rpc_server.name, result.returncode, result.output)
            raise EngineProblemFound(problem)
    server = require_llama_server(location)
    return parse_devices(_answer(location, server, "--list-devices").output)


def read_compiled_features(location: EngineLocation) -> frozenset[str]:
    """Ask which CPU features the build was compiled for; empty where it does not tell.

    llama-server prints them before it looks for its model, which here does not exist.
    """
    if location.llama_server is None:
        return frozenset()
    arguments = ("--model", _NO_SUCH_MODEL, "--verbosity", "4", "--offline")
    try:
        result = run_program(
            location, location.llama_server, arguments, deadline_seconds=_DEADLINE_SECONDS
        )
    except EngineProblemFound:
        return frozenset()
    return compiled_features(result.output)


def require_llama_server(location: EngineLocation) -> Path:
    """Give the llama-server's path.

    Raises:
        EngineProblemFound: the engine has none.
    """
    if location.llama_server is None:
        place = location.rpc_server.parent if location.rpc_server else "the engine"
        raise EngineProblemFound(missing_program("llama-server", str(place)))
    return location.llama_server


def parse_version(text: str) -> tuple[int | None, str | None, bool]:
    """Read build number, commit, and whether the build says that it was modified.

    A build number of 0 or 1 is what a source tree without its history counts, and means nothing.
    A build is called modified only where its own version says so (git's ``-dirty``); without a
    commit (a source archive has none) nothing speaks against it, and it counts as stock.
    """
    match = _LONG_VERSION.search(text) or _VERSION.search(text)
    if match is None:
        return None, None, False
    build = int(match[1])
    commit = _COMMIT.match(match[2])
    is_modified = match[2].endswith(("-dirty", "-modified", "+"))
    return build if build > 1 else None, commit[0] if commit else None, is_modified


def parse_devices(text: str) -> tuple[EngineDevice, ...]:
    """Read ``  Vulkan0: NAME (8192 MiB, 8000 MiB free)`` lines."""
    return tuple(
        EngineDevice(
            name=match[1],
            description=match[2],
            total_bytes=int(match[3]) * _MEBIBYTE,
            free_bytes=int(match[4]) * _MEBIBYTE,
        )
        for match in _DEVICE.finditer(text)
    )


def parse_features(help_text: str) -> EngineFeatures:
    """Tell which options ``llama-server --help`` names."""

    def knows(option: str) -> bool:
        return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_text) is not None

    return EngineFeatures(
        rpc=knows("--rpc"),
        override_tensor=knows("--override-tensor"),
        no_repack=knows("--no-repack"),
        fit=knows("--fit"),
    )


def ggml_version(location: EngineLocation) -> str | None:
    """Read ggml's version off its library's file name; a static build has none."""
    for folder in location.library_folders:
        for path in sorted(folder.glob("libggml-base*")):
            if match := _GGML_LIBRARY.fullmatch(path.name):
                return match[1]
    return None


def _best_build(location: EngineLocation, server: Path, said: int | None) -> int | None:
    """Prefer the package's version: many packages compile llama.cpp without its history."""
    if location.package_version and (match := _PACKAGE_BUILD.match(location.package_version)):
        return int(match[1])
    if said is not None:
        return said
    for part in reversed(server.resolve().parts):
        if match := _FOLDER_BUILD.match(part):
            return int(match[1])
    return None


def _answer(location: EngineLocation, server: Path, option: str) -> ProbeResult:
    result = run_program(location, server, (option,), deadline_seconds=_DEADLINE_SECONDS)
    if result.returncode != 0:
        problem = problem_of_exit(server.name, result.returncode, result.output)
        raise EngineProblemFound(problem)
    return result
