"""What the CPU executes is tried for real; what is built from it follows by rule."""

import platform
from pathlib import Path

import pytest

from linkcpp.engine.cpu_features import (
    compiled_features,
    cpu_flags,
    executes,
    flags_against_amx,
    options_for,
    usable_features,
    with_flags,
)

_AMX = {"amx_tile", "amx_int8", "amx_bf16"}
_RETURN, _ILLEGAL = bytes.fromhex("c3"), bytes.fromhex("0f0b")  # ret, ud2
# By the kernel's names, without AMX, which the kernel may list and not grant.
_LISTED = {
    "SSE42": "sse4_2",
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "BMI2": "bmi2",
    "AVX_VNNI": "avx_vnni",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
}
_on_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the instructions are x86-64's"
)


@_on_x86
def test_an_illegal_instruction_ends_only_the_process_that_tries_it() -> None:
    assert executes(_RETURN)
    assert not executes(_ILLEGAL)


@_on_x86
def test_what_runs_is_what_the_kernel_lists() -> None:
    usable = usable_features()
    assert usable is not None
    listed = cpu_flags()
    for name, flag in _LISTED.items():
        assert (name in usable) == (flag in listed), name
    if not listed & _AMX:
        assert not usable & {"AMX_TILE", "AMX_INT8", "AMX_BF16"}


def test_the_flags_of_the_first_cpu_are_read(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu amx_tile avx\n\nflags : other\n")
    assert cpu_flags(cpuinfo) == {"fpu", "amx_tile", "avx"}
    assert cpu_flags(tmp_path / "none") == frozenset()


@pytest.mark.parametrize(
    ("listed", "usable", "is_left_out"),
    [
        ({"avx2"}, {"AVX2"}, False),
        ({"avx2"}, None, False),
        (_AMX, {"AVX2", "AMX_TILE", "AMX_INT8", "AMX_BF16"}, False),
        (_AMX, {"AVX2"}, True),
        (_AMX, {"AVX2", "AMX_TILE"}, True),
        (_AMX, None, True),
    ],
)
def test_amx_is_left_out_where_it_is_listed_and_did_not_run(
    listed: set[str], usable: set[str] | None, is_left_out: bool
) -> None:
    flags = flags_against_amx(listed, usable)
    assert flags == (("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16") if is_left_out else ())


def test_compiler_flags_come_after_the_users_own() -> None:
    environment = with_flags({"CFLAGS": "-O2", "A": "b"}, ("-x", "-y"))
    assert environment == {"CFLAGS": "-O2 -x -y", "CXXFLAGS": "-x -y", "A": "b"}
    assert with_flags({"CFLAGS": "-O2"}, ()) == {"CFLAGS": "-O2"}


def test_a_careful_build_uses_what_was_tried_and_nothing_else() -> None:
    options = options_for({"AVX", "AVX2"})
    assert options[0] == "-DGGML_NATIVE=OFF"
    assert {"-DGGML_AVX=ON", "-DGGML_AVX2=ON", "-DGGML_AVX512=OFF"} < set(options)
    assert "-DGGML_AMX_INT8=OFF" in options
    assert not any(option.endswith("=ON") for option in options_for(None))


def test_features_that_a_build_was_compiled_for_are_read_off_its_own_words() -> None:
    said = "0.1 I system_info: n_threads = 2 / 2 | CPU : AVX = 1 | AMX_INT8 = 1 | AVX2 = 0 | X = 1"
    assert compiled_features(f"before: AVX512 = 1\n{said}\nafter") == {"AVX", "AMX_INT8"}
    assert compiled_features("error: no such option") == frozenset()
