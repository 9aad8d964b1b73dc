"""What can be wrong with an engine: each problem with a code, one sentence and the way out.

*Pure*: exit codes, error numbers and the programs' own words in, an ``EngineProblem`` out.
"""

import errno
import re
import signal
from collections.abc import Collection
from enum import StrEnum

from linkcpp.engine.process_spec import missing_library, signal_name, telling_line
from linkcpp.engine.records import EngineProblem

# What asks for another build; ``check`` says which, since that depends on where this one is from.
ANOTHER_BUILD = "Run `linkcpp engine install` to get another build."
BUILD_HERE = "Run `linkcpp engine install source` to build one for this machine."
_DARWIN_BAD_CPU_TYPE = 86  # errno EBADARCH, which exists on macOS only


class ProblemCode(StrEnum):
    """Stable names of the problems, for ``--json`` and tests."""

    MISSING_PROGRAM = "missing_program"
    NOT_EXECUTABLE = "not_executable"
    WRONG_ARCHITECTURE = "wrong_architecture"
    MISSING_LIBRARY = "missing_library"
    ILLEGAL_INSTRUCTION = "illegal_instruction"
    NO_RPC = "no_rpc"
    TOO_OLD = "too_old"
    UNKNOWN_PROTOCOL = "unknown_protocol"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"


def missing_program(name: str, place: str) -> EngineProblem:
    """Tell that the engine at ``place`` has no program ``name``."""
    return _problem(ProblemCode.MISSING_PROGRAM, f"There is no {name} in {place}.", ANOTHER_BUILD)


def no_rpc(reason: str) -> EngineProblem:
    """Tell that the build cannot take part in a swarm; ``reason`` is a whole sentence."""
    return _problem(
        ProblemCode.NO_RPC,
        reason,
        "Build llama.cpp with -DGGML_RPC=ON, or run `linkcpp engine install`.",
    )


def too_old(reason: str) -> EngineProblem:
    """Tell that the build lacks something that linkcpp needs; ``reason`` is a whole sentence."""
    return _problem(ProblemCode.TOO_OLD, reason, ANOTHER_BUILD)


def unknown_protocol(reason: str) -> EngineProblem:
    """Tell that the build speaks a ggml-RPC that linkcpp does not; ``reason`` is a sentence."""
    return _problem(ProblemCode.UNKNOWN_PROTOCOL, reason, ANOTHER_BUILD)


def crashed(reason: str) -> EngineProblem:
    """Tell that the engine does not do its work; ``reason`` is a whole sentence."""
    return _problem(ProblemCode.CRASHED, reason, ANOTHER_BUILD)


def timed_out(program: str, doing: str, seconds: float) -> EngineProblem:
    """Tell that ``program`` did not get done with ``doing`` before its deadline."""
    return _problem(
        ProblemCode.TIMED_OUT,
        f"{program} did not {doing} within {seconds:.0f} seconds.",
        "Try it by hand: a driver that hangs, or a machine that swaps, can be the reason.",
    )


def name_features(problem: EngineProblem, features: Collection[str]) -> EngineProblem:
    """Say in ``problem``, an illegal instruction, which CPU features the build wants in vain."""
    if not features:
        return problem
    names = ", ".join(sorted(features))
    start, _, _ = problem.message.partition(":")
    message = f"{start}: this build was compiled for {names}, which this machine does not execute."
    return problem.model_copy(update={"message": message})


def problem_of_start(program: str, error: OSError) -> EngineProblem:
    """Explain why the operating system did not start ``program``, which exists as a file."""
    if error.errno in (errno.ENOEXEC, _DARWIN_BAD_CPU_TYPE):
        return _problem(
            ProblemCode.WRONG_ARCHITECTURE,
            f"{program} was built for another kind of processor or operating system.",
            BUILD_HERE,
        )
    if error.errno == errno.EACCES:
        return _problem(
            ProblemCode.NOT_EXECUTABLE,
            f"{program} may not be executed.",
            "Run `chmod +x` on it; if that does not help, its disk is mounted `noexec`.",
        )
    if error.errno == errno.ENOENT:
        # The file is there: what the kernel misses is the loader that the file names.
        return _problem(
            ProblemCode.MISSING_LIBRARY,
            f"{program} needs a system loader (C library) that this machine does not have.",
            BUILD_HERE,
        )
    return _problem(
        ProblemCode.CRASHED,
        f"{program} cannot be started: {error.strerror or error}.",
        ANOTHER_BUILD,
    )


def problem_of_exit(program: str, returncode: int, output: str) -> EngineProblem:
    """Explain why ``program`` ended; ``returncode`` is minus the signal's number if one ended it.

    ``output`` is the end of what it printed, stdout and stderr.
    """
    if (problem := _library_problem(program, output)) is not None:
        return problem
    if returncode in (-signal.SIGILL, 128 + signal.SIGILL):
        return _problem(
            ProblemCode.ILLEGAL_INSTRUCTION,
            f"{program} dies of an illegal instruction: "
            "this build needs CPU features that this machine lacks.",
            BUILD_HERE,
        )
    reason = _reason(output)
    said = f": {reason}." if reason else "."
    if returncode < 0:
        hint = ANOTHER_BUILD
        if returncode == -signal.SIGKILL:
            hint = "Out of memory, or (on macOS) quarantined: `xattr -d com.apple.quarantine FILE`."
        return _problem(
            ProblemCode.CRASHED, f"{program} was ended by {signal_name(-returncode)}{said}", hint
        )
    return _problem(
        ProblemCode.CRASHED, f"{program} ended with exit code {returncode}{said}", ANOTHER_BUILD
    )


_TOO_OLD_LIBRARY = re.compile(r"version `([\w.]+)' not found \(required by")
_MISSING_SYMBOL = re.compile(r"(?:undefined symbol|Symbol not found): ?(\S+)")
_LIBRARY_SOURCES = {
    "libvulkan": "Install the Vulkan loader (Debian: libvulkan1; Fedora: vulkan-loader).",
    "libgomp": "Install the OpenMP runtime (Debian: libgomp1; Fedora: libgomp; macOS: libomp).",
    "libcudart": "Install the CUDA runtime of the version that the library's name ends with.",
    "libcublas": "Install the CUDA runtime of the version that the library's name ends with.",
    "libcuda.": "Install the NVIDIA driver.",
    "libcurl": "Install libcurl (Debian: libcurl4; Fedora: libcurl).",
    "libssl": "Install OpenSSL (Debian: libssl3; Fedora: openssl-libs).",
    "libstdc++": "Install the C++ runtime (Debian: libstdc++6; Fedora: libstdc++).",
    "libopenblas": "Install OpenBLAS (Debian: libopenblas0; Fedora: openblas).",
    "libhip": "Install the ROCm runtime.",
    "libroc": "Install the ROCm runtime.",
}
_ENGINE_LIBRARY = re.compile(r"lib(?:ggml|llama|mtmd)")


def _library_problem(program: str, output: str) -> EngineProblem | None:
    if found := missing_library(output.splitlines()):
        library = found.rsplit("/", 1)[-1]
        return _problem(
            ProblemCode.MISSING_LIBRARY,
            f"{program} does not find the library {library}.",
            _library_hint(library),
        )
    if match := _TOO_OLD_LIBRARY.search(output):
        return _problem(
            ProblemCode.MISSING_LIBRARY,
            f"{program} needs {match[1].replace('_', ' ')}, newer than this system's.",
            BUILD_HERE,
        )
    if match := _MISSING_SYMBOL.search(output):
        return _problem(
            ProblemCode.MISSING_LIBRARY,
            f"{program} loads a library of another build, which lacks {match[1].rstrip(',')}.",
            "Keep one build in one folder, and look for stray copies on LD_LIBRARY_PATH.",
        )
    return None


def _library_hint(library: str) -> str:
    if _ENGINE_LIBRARY.match(library):
        return (
            "It belongs to llama.cpp itself: keep it beside the program or in ../lib, "
            "or run `linkcpp engine install`."
        )
    for start, hint in _LIBRARY_SOURCES.items():
        if library.startswith(start):
            return hint
    return f"Install the system package that has {library}, or run `linkcpp engine install source`."


def _reason(output: str) -> str | None:
    line = telling_line(output.splitlines())
    # Without llama.cpp's time stamp and level.
    return re.sub(r"^[\d.]+ [A-Z] ", "", line)[:200].rstrip(".") if line else None


def _problem(code: ProblemCode, message: str, hint: str) -> EngineProblem:
    return EngineProblem(code=code.value, message=message, hint=hint)
