"""The names of an engine's operations: op numbers differ between builds, names do not.

The tables are read from the engine's own ``libggml-base`` with ``ggml_op_name``,
``ggml_unary_op_name`` and ``ggml_glu_op_name``, in a short subprocess: a number past the end of a
table may crash. Where that does not work, the table of the RPC version is taken.
"""

import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record
from linkcpp.engine.records import EngineLocation, RpcVersion

# Prints one line a name: the table's letter and the name. Tables end at a null, at a text that is
# no name, or at a name that came before; the op table ends with GLU in every build known.
_READER = """
import ctypes, re, sys
library = ctypes.CDLL(sys.argv[1])
name = re.compile(rb"[A-Z][A-Z0-9_]{1,40}")
for letter, kind in (("o", "op"), ("u", "unary_op"), ("g", "glu_op")):
    function = getattr(library, f"ggml_{kind}_name")
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_int]
    seen = set()
    for number in range(256):
        text = function(number)
        if text is None or not name.fullmatch(text) or text in seen:
            break
        seen.add(text)
        print(letter, text.decode(), flush=True)
        if letter == "o" and text == b"GLU":
            break
"""
_READ_SECONDS = 20.0
_LIBRARY_PATTERNS = ("libggml-base.so*", "libggml-base*.dylib")

_OPS = (
    "NONE DUP ADD ADD_ID ADD1 ACC SUB MUL DIV SQR SQRT LOG SIN COS SUM SUM_ROWS CUMSUM MEAN "
    "ARGMAX COUNT_EQUAL REPEAT REPEAT_BACK CONCAT SILU_BACK NORM RMS_NORM RMS_NORM_BACK "
    "GROUP_NORM L2_NORM MUL_MAT MUL_MAT_ID OUT_PROD SCALE SET CPY CONT RESHAPE VIEW PERMUTE "
    "TRANSPOSE GET_ROWS GET_ROWS_BACK SET_ROWS DIAG DIAG_MASK_INF DIAG_MASK_ZERO SOFT_MAX "
    "SOFT_MAX_BACK ROPE ROPE_BACK CLAMP CONV_TRANSPOSE_1D IM2COL IM2COL_BACK IM2COL_3D "
    "COL2IM_1D CONV_2D CONV_3D CONV_2D_DW CONV_TRANSPOSE_2D POOL_1D POOL_2D POOL_2D_BACK "
    "UPSCALE PAD PAD_REFLECT_1D ROLL ARANGE TIMESTEP_EMBEDDING ARGSORT TOP_K LEAKY_RELU TRI "
    "FILL FLASH_ATTN_EXT FLASH_ATTN_BACK SSM_CONV SSM_SCAN WIN_PART WIN_UNPART GET_REL_POS "
    "ADD_REL_POS RWKV_WKV6 GATED_LINEAR_ATTN RWKV_WKV7 SOLVE_TRI GATED_DELTA_NET "
    "LIGHTNING_INDEXER DSV4_HC_COMB DSV4_HC_PRE DSV4_HC_POST UNARY MAP_CUSTOM1 MAP_CUSTOM2 "
    "MAP_CUSTOM3 CUSTOM CROSS_ENTROPY_LOSS CROSS_ENTROPY_LOSS_BACK OPT_STEP_ADAMW OPT_STEP_SGD "
    "GLU"
)
_UNARY = (
    "ABS SGN NEG STEP TANH ELU RELU SIGMOID GELU GELU_QUICK SILU HARDSWISH HARDSIGMOID EXP EXPM1 "
    "SOFTPLUS GELU_ERF XIELU FLOOR CEIL ROUND TRUNC"
)
_GLU = "REGLU GEGLU SWIGLU SWIGLU_OAI GEGLU_ERF GEGLU_QUICK"
_GLU_BY_MAJOR = {4: _GLU, 7: f"{_GLU} SWIGLU_CLAMP"}


class OpTable(Record):
    """The names of a build's operations; an index is the number that the build uses."""

    ops: tuple[str, ...]
    unary: tuple[str, ...]
    glu: tuple[str, ...]

    def op_name(self, number: int) -> str:
        """Name an operation; a number that the table does not have names itself."""
        return _name(self.ops, number)

    def unary_name(self, number: int) -> str:
        """Name an activation (the first parameter of UNARY)."""
        return _name(self.unary, number)

    def glu_name(self, number: int) -> str:
        """Name a gated activation (the first parameter of GLU)."""
        return _name(self.glu, number)

    def op_number(self, name: str) -> int:
        """Number an operation for this build.

        Raises:
            LinkcppError: the build does not have it.
        """
        return _number(self.ops, name)

    def unary_number(self, name: str) -> int:
        """Number an activation; raises as ``op_number``."""
        return _number(self.unary, name)

    def glu_number(self, name: str) -> int:
        """Number a gated activation; raises as ``op_number``."""
        return _number(self.glu, name)


def _name(names: Sequence[str], number: int) -> str:
    return names[number] if 0 <= number < len(names) else f"operation {number}"


def _number(names: Sequence[str], name: str) -> int:
    try:
        return names.index(name)
    except ValueError:
        raise LinkcppError(
            f"This engine has no operation {name}.",
            hint="Use the engine build that the backbone uses: see `linkcpp engine list`.",
        ) from None


def op_table_of_version(version: RpcVersion) -> OpTable:
    """Return the table known for an RPC version.

    Raises:
        LinkcppError: none is known.
    """
    glu = _GLU_BY_MAJOR.get(version.major)
    if glu is None:
        raise LinkcppError(f"The operations of RPC version {version} are not known.")
    return OpTable(ops=tuple(_OPS.split()), unary=tuple(_UNARY.split()), glu=tuple(glu.split()))


def read_op_table(location: EngineLocation, version: RpcVersion) -> OpTable:
    """Read the table from the engine's library, else take the one known for its RPC version.

    Raises:
        LinkcppError: neither is possible.
    """
    for folder in location.library_folders:
        for pattern in _LIBRARY_PATTERNS:
            for library in sorted(folder.glob(pattern)):
                if table := _read_library(library):
                    return table
    return op_table_of_version(version)


@functools.cache
def _read_library(library: Path) -> OpTable | None:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _READER, str(library)],
            capture_output=True,
            text=True,
            timeout=_READ_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    tables: dict[str, list[str]] = {"o": [], "u": [], "g": []}
    for line in done.stdout.splitlines():
        letter, _, name = line.partition(" ")
        tables.get(letter, []).append(name)
    if "MUL_MAT_ID" not in tables["o"] or "SILU" not in tables["u"] or "SWIGLU" not in tables["g"]:
        return None
    return OpTable(ops=tuple(tables["o"]), unary=tuple(tables["u"]), glu=tuple(tables["g"]))
