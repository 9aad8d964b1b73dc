"""The pure decisions of supervision."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.engine.process_spec import (
    RestartPolicy,
    clean_line,
    describe_exit,
    failures_after_run,
    restart_delay_seconds,
)

POLICY = RestartPolicy(limit=4, first_delay_seconds=0.5, largest_delay_seconds=3)


def test_delays_double_up_to_the_largest_and_end_at_the_limit() -> None:
    delays = [restart_delay_seconds(POLICY, failures) for failures in range(1, 7)]
    assert delays == [0.5, 1, 2, 3, None, None]


def test_no_restart_is_the_default() -> None:
    assert restart_delay_seconds(RestartPolicy(), 1) is None


def test_a_long_run_wipes_out_earlier_failures() -> None:
    assert failures_after_run(POLICY, 3, ran_seconds=59) == 4
    assert failures_after_run(POLICY, 3, ran_seconds=60) == 1


@given(st.integers(1, 10**9), st.integers(0, 10**9))
def test_every_delay_is_within_bounds(failures: int, limit: int) -> None:
    delay = restart_delay_seconds(POLICY.model_copy(update={"limit": limit}), failures)
    assert (delay is None) == (failures > limit)
    assert delay is None or 0.5 <= delay <= 3


@pytest.mark.parametrize(
    ("code", "lines", "said"),
    [
        (-4, [], "died of SIGILL"),
        (-6, ["GGML_ASSERT(x) failed", "----"], "died of SIGABRT: GGML_ASSERT(x) failed"),
        (-9, ["all fine"], "was killed (SIGKILL), which often means that memory ran out"),
        (1, ["error: no model", "cleaning up"], "exited with 1: error: no model"),
        (0, ["Failed to create server socket"], "exited with 0: Failed to create server socket"),
        (3, ["bye", "---", ""], "exited with 3: bye"),
        (
            -11,
            ['{"time": "now", "level": "error", "message": "lost", "exception": "A\\nB: no file"}'],
            "died of SIGSEGV: lost: B: no file",
        ),
        (
            127,
            [
                "/x/llama-server: error while loading shared libraries: libgomp.so.1: "
                "cannot open shared object file: No such file or directory"
            ],
            "misses the shared library libgomp.so.1",
        ),
        (
            -6,
            ["dyld[77]: Library not loaded: @rpath/libggml.dylib"],
            "misses the shared library @rpath/libggml.dylib",
        ),
        (
            1,
            ['CANNOT LINK EXECUTABLE "llama-server": library "libomp.so" not found: needed by x'],
            "misses the shared library libomp.so",
        ),
    ],
)
def test_an_end_is_told_in_words(code: int, lines: list[str], said: str) -> None:
    assert describe_exit(code, lines) == said


def test_colours_are_not_part_of_a_line() -> None:
    assert clean_line("\x1b[31mload\x1b[0m: 3 MiB\r") == "load: 3 MiB"
