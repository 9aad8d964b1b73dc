"""An OpenMP runtime for prebuilt engines on systems that have none.

Prebuilt Linux programs need ``libgomp.so.1``, which comes with a compiler and is missing on minimal
systems. The package ``cmeel-libomp`` carries LLVM's runtime under that name too (it has libgomp's
interface), in ``cmeel.prefix/lib`` of whatever folder it was installed into.
"""

import ctypes
import functools
import sys
from collections.abc import Iterable
from pathlib import Path

OPENMP_PACKAGE = "cmeel-libomp"

_LIBRARY = "libgomp.so.1"
_FOLDER = Path("cmeel.prefix", "lib")


def openmp_folders(programs: Iterable[Path]) -> list[Path]:
    """Folders to put on the loader's path so that ``programs`` find an OpenMP runtime.

    Empty where the system has a runtime of its own, which is always preferred.
    """
    if _system_has_openmp():
        return []
    # `pip install` puts the runtime beside the package that a program belongs to.
    near = (ancestor / _FOLDER for program in programs for ancestor in program.parents[:4])
    return [folder for folder in dict.fromkeys(near) if (folder / _LIBRARY).is_file()]


@functools.cache
def _system_has_openmp() -> bool:
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True
