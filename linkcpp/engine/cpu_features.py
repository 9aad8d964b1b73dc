"""What this CPU really executes, and the build options that follow from it.

A feature that the CPU lists may still be refused by the kernel or hypervisor (AMX needs a
permission), so one instruction of each is executed in a process of its own, which an illegal one
ends. This file runs as that process, so it imports nothing of linkcpp.
"""

import platform
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_DEADLINE_SECONDS = 10.0
_AMX_FEATURES = ("AMX_TILE", "AMX_INT8", "AMX_BF16")
_AMX_FLAGS = {"amx_tile", "amx_int8", "amx_bf16"}
_RETURN = bytes.fromhex("c3")
_LOAD_TILE_CONFIG = "c4e2784907"  # ldtilecfg [rdi]
_RELEASE_TILES = "c4e27849c0c3"  # tilerelease; ret
_CLEAR_AND_RETURN = "c5f877c3"  # vzeroupper; ret
# x86-64 machine code that uses each feature, by the name that llama.cpp gives it.
_INSTRUCTIONS = {
    "SSE42": "f20f38f1c0c3",  # crc32 eax, eax
    "AVX": f"c5fc58c0{_CLEAR_AND_RETURN}",  # vaddps ymm0, ymm0, ymm0
    "AVX2": f"c5fdfec0{_CLEAR_AND_RETURN}",  # vpaddd ymm0, ymm0, ymm0
    "FMA": f"c4e27db8c0{_CLEAR_AND_RETURN}",  # vfmadd231ps ymm0, ymm0, ymm0
    "F16C": f"c4e27d13c0{_CLEAR_AND_RETURN}",  # vcvtph2ps ymm0, xmm0
    "BMI2": "c4e27bf5c0c3",  # pdep eax, eax, eax
    "AVX_VNNI": f"c4e27d50c0{_CLEAR_AND_RETURN}",  # {vex} vpdpbusd ymm0, ymm0, ymm0
    # One each of F, CD, BW, DQ and VL, which llama.cpp takes together.
    "AVX512": "62f17c4858c062f27d48c4c062f17d48fcc062f17c4854c062a17d00fec0" + _CLEAR_AND_RETURN,
    "AVX512_VBMI": f"62f27d488dc0{_CLEAR_AND_RETURN}",  # vpermb zmm0, zmm0, zmm0
    "AVX512_VNNI": f"62f27d4850c0{_CLEAR_AND_RETURN}",  # vpdpbusd zmm0, zmm0, zmm0
    "AVX512_BF16": f"62f27e4852c0{_CLEAR_AND_RETURN}",  # vdpbf16ps zmm0, zmm0, zmm0
    "AMX_TILE": f"{_LOAD_TILE_CONFIG}c4e27b49c0{_RELEASE_TILES}",  # tilezero tmm0
    "AMX_INT8": f"{_LOAD_TILE_CONFIG}c4e26b5ec1{_RELEASE_TILES}",  # tdpbssd tmm0, tmm1, tmm2
    "AMX_BF16": f"{_LOAD_TILE_CONFIG}c4e26a5cc1{_RELEASE_TILES}",  # tdpbf16ps tmm0, tmm1, tmm2
}
_SYSTEM_INFO = re.compile(r"system_info: .*")
_FEATURE_ON = re.compile(r"\b(\w+) = 1\b")
_ARCH_PRCTL = 158
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Read the features that the kernel lists for the first CPU; none where it lists none."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass  # not Linux, or hidden
    return frozenset()


def usable_features() -> frozenset[str] | None:
    """Try one instruction of each x86-64 feature; ``None`` where trying is not possible here."""
    if platform.machine() not in ("x86_64", "AMD64") or not executes(_RETURN):
        return None
    return frozenset(name for name, code in _INSTRUCTIONS.items() if executes(bytes.fromhex(code)))


def executes(code: bytes) -> bool:
    """Whether a process that calls this machine code lives on."""
    command = [sys.executable, "-I", "-S", __file__, code.hex()]
    try:
        tried = subprocess.run(command, capture_output=True, check=False, timeout=_DEADLINE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def flags_against_amx(listed: Collection[str], usable: Collection[str] | None) -> tuple[str, ...]:
    """Give the compiler flags that leave AMX out of a native build. *Pure.*

    ``listed`` are the flags of ``/proc/cpuinfo``, ``usable`` what ``usable_features`` found. Only a
    CPU that lists AMX, but did not execute all of it, needs any.
    """
    if not _AMX_FLAGS.intersection(listed) or set(_AMX_FEATURES) <= set(usable or ()):
        return ()
    return ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")


def options_for(usable: Collection[str] | None) -> tuple[str, ...]:
    """Give the CMake options of a build that uses only what was seen to run. *Pure.*"""
    features = [
        f"-DGGML_{name}={'ON' if name in (usable or ()) else 'OFF'}" for name in _INSTRUCTIONS
    ]
    return ("-DGGML_NATIVE=OFF", *features)


def with_flags(environment: Mapping[str, str], flags: Collection[str]) -> dict[str, str]:
    """Give ``environment`` with compiler flags for C and C++ after those already set. *Pure.*"""
    added = {
        name: " ".join([*filter(None, [environment.get(name)]), *flags])
        for name in ("CFLAGS", "CXXFLAGS")
    }
    return {**environment, **added} if flags else dict(environment)


def compiled_features(output: str) -> frozenset[str]:
    """Read the features that a build was compiled for off llama-server's ``system_info``. *Pure.*

    Empty where the output has no such line.
    """
    line = _SYSTEM_INFO.search(output)
    return frozenset(_FEATURE_ON.findall(line[0])) & _INSTRUCTIONS.keys() if line else frozenset()


def _call(code: bytes) -> None:
    """Execute machine code with the address of an AMX tile configuration as its argument."""
    # Only the process that tries an instruction needs these.
    import ctypes  # noqa: PLC0415
    import mmap  # noqa: PLC0415

    if sys.platform == "linux":
        ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    # Palette 1; eight tiles of 16 rows with 64 bytes each.
    tiles = bytes([1, *bytes(15), *[64, 0] * 8, *bytes(16), *[16] * 8, *bytes(8)])
    argument = ctypes.create_string_buffer(tiles, len(tiles))
    readable_and_executable = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    with mmap.mmap(-1, mmap.PAGESIZE, prot=readable_and_executable) as memory:
        memory.write(code)
        place = ctypes.c_char.from_buffer(memory)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(place))(argument)
        del place


def _main() -> None:
    import resource  # noqa: PLC0415

    # An instruction that the CPU refuses is an answer, not worth a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _call(bytes.fromhex(sys.argv[1]))


if __name__ == "__main__":
    _main()
