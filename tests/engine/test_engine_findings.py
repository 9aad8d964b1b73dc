"""What programs print, read as fingerprints and as problems; pure, no program runs."""

import errno
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.engine.fingerprint import parse_devices, parse_features, parse_version
from linkcpp.engine.problems import ProblemCode, problem_of_exit, problem_of_start


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 1 (571d0d5)\nbuilt with GNU", (None, "571d0d5", False)),
        ("version: 10068 (571d0d5)\n", (10068, "571d0d5", False)),
        ("noise\nversion: 0.5.0-dev (build 1, commit 0c1e570)\n", (None, "0c1e570", False)),
        ("version: 0.5.0 (build 11434, commit 0c1e570)", (11434, "0c1e570", False)),
        ("version: 10068 (571d0d5-dirty)", (10068, "571d0d5", True)),
        ("version: 0 (unknown)", (None, None, False)),
        ("something else", (None, None, False)),
    ],
)
def test_both_ways_to_tell_the_version_are_read(
    text: str, expected: tuple[int | None, str | None, bool]
) -> None:
    assert parse_version(text) == expected


def test_devices_with_brackets_and_colons_in_their_names_are_read() -> None:
    listed = (
        "ggml_vulkan: Found 1 Vulkan devices:\nAvailable devices:\n"
        "  Vulkan0: AMD Radeon RX 7900 (RADV NAVI31) (24560 MiB, 24000 MiB free)\n"
        "  CPU: Ryzen 9: 16 cores (64000 MiB, 32000 MiB free)\n"
    )
    first, second = parse_devices(listed)
    assert first.name == "Vulkan0"
    assert first.description == "AMD Radeon RX 7900 (RADV NAVI31)"
    assert first.total_bytes == 24560 * 2**20
    assert first.free_bytes == 24000 * 2**20
    assert (second.name, second.description) == ("CPU", "Ryzen 9: 16 cores")


def test_an_option_is_not_taken_for_a_longer_one() -> None:
    features = parse_features("--rpc-timeout N\n--fit-target N\n--spec-draft-override-tensor X")
    assert not any(features.model_dump().values())


@given(st.text(max_size=400))
def test_no_output_makes_the_readers_fail(text: str) -> None:
    parse_version(text)
    parse_devices(text)
    parse_features(text)
    assert problem_of_exit("llama-server", 1, text).message


@pytest.mark.parametrize(
    ("output", "library"),
    [
        (
            "llama-server: error while loading shared libraries: libgomp.so.1: cannot open "
            "shared object file: No such file or directory",
            "libgomp.so.1",
        ),
        (
            "Error loading shared library libstdc++.so.6: No such file or directory (needed by x)",
            "libstdc++.so.6",
        ),
        (
            "dyld[12]: Library not loaded: @rpath/libllama.dylib\n  Referenced from",
            "libllama.dylib",
        ),
        (
            'CANNOT LINK EXECUTABLE "./llama-server": library "libomp.so" not found',
            "libomp.so",
        ),
    ],
)
def test_every_loader_s_way_to_miss_a_library_is_understood(output: str, library: str) -> None:
    problem = problem_of_exit("llama-server", 127, output)
    assert problem.code == ProblemCode.MISSING_LIBRARY
    assert library in problem.message


def test_a_c_library_that_is_too_old_is_named_with_the_version_needed() -> None:
    output = "/lib/libc.so.6: version `GLIBC_2.38' not found (required by ./llama-server)"
    problem = problem_of_exit("llama-server", 1, output)
    assert problem.code == ProblemCode.MISSING_LIBRARY
    assert "GLIBC 2.38" in problem.message
    assert "source" in problem.hint


def test_mixed_builds_are_recognised_by_the_missing_symbol() -> None:
    output = "llama-server: symbol lookup error: libllama.so: undefined symbol: ggml_new_thing"
    problem = problem_of_exit("llama-server", 127, output)
    assert problem.code == ProblemCode.MISSING_LIBRARY
    assert "ggml_new_thing" in problem.message


@pytest.mark.parametrize("code", [-signal.SIGILL, 128 + signal.SIGILL])
def test_sigill_is_named_also_through_a_shell(code: int) -> None:
    assert problem_of_exit("x", code, "").code == ProblemCode.ILLEGAL_INSTRUCTION


def test_another_signal_and_its_reason_are_told() -> None:
    problem = problem_of_exit("x", -signal.SIGABRT, "0.1.2 E GGML_ASSERT(a) failed\n0.2 I bye")
    assert problem.code == ProblemCode.CRASHED
    assert "SIGABRT" in problem.message
    assert "GGML_ASSERT(a) failed" in problem.message


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOEXEC, ProblemCode.WRONG_ARCHITECTURE),
        (86, ProblemCode.WRONG_ARCHITECTURE),
        (errno.EACCES, ProblemCode.NOT_EXECUTABLE),
        (errno.ENOENT, ProblemCode.MISSING_LIBRARY),
        (errno.ENOMEM, ProblemCode.CRASHED),
    ],
)
def test_what_the_system_says_at_the_start_is_understood(number: int, code: ProblemCode) -> None:
    assert problem_of_start("llama-server", OSError(number, "no")).code == code
