"""Engines from release archives, fetched from a web server on this machine."""

import hashlib
import io
import os
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linkcpp.common.errors import LinkcppError
from linkcpp.engine.archive import ArchiveLimits, archive_name, parse_sha256, unpack_archive
from linkcpp.engine.binaries import engines_folder, find_engines
from linkcpp.engine.check import check_engine
from linkcpp.engine.install import install_archive
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.staging import staged_engine
from tests.support.lengths import repeated

Serve = Callable[..., str]


def _silent(step: str, done: int | None, total: int | None) -> None:
    """Report to nobody."""


class _Files(BaseHTTPRequestHandler):
    """Serves what the test registered: path -> (body, announced length, status, headers).

    A length below 0 is not announced: the body then ends with the connection.
    """

    files: dict[str, tuple[bytes, int, int, dict[str, str]]]

    def do_GET(self) -> None:
        body, length, status, headers = self.files[self.path]
        self.send_response(status)
        if length >= 0:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if len(body) < length and "X-Stall" in headers:
            time.sleep(60)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve bytes at a path of a loopback web server; gives the URL."""
    handler = type("Files", (_Files,), {"files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()

    def add(
        path: str,
        body: bytes,
        *,
        length: int | None = None,
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> str:
        entry = (body, len(body) if length is None else length, status, headers or {})
        handler.files[path] = entry  # type: ignore[attr-defined]
        return f"http://127.0.0.1:{server.server_address[1]}{path}"

    yield add
    server.shutdown()
    server.server_close()


def _tar(*members: tuple[str, bytes | None, str | None], mode: int = 0o755) -> bytes:
    """Make a .tar.gz of (name, content or None, symbolic link's target or None)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content, link in members:
            info = tarfile.TarInfo(name)
            info.mode = mode
            if link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, link
                tar.addfile(info)
            elif content is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _nothing_left() -> bool:
    """Whether nothing of an installation is there."""
    folder = engines_folder()
    return not folder.exists() or [p.name for p in folder.iterdir() if p.name != ".lock"] == []


def _unpack(data: bytes, folder: Path, limits: ArchiveLimits | None = None) -> None:
    archive = folder.parent / "archive"
    archive.write_bytes(data)
    folder.mkdir(exist_ok=True)
    unpack_archive(archive, folder, _silent, limits or ArchiveLimits())


def _release(engine: EngineLocation) -> bytes:
    """Lay a real engine out as a release archive does, library links and all."""
    buffer = io.BytesIO()
    paths = [engine.llama_server, engine.rpc_server]
    libraries = {
        path.resolve() for folder in engine.library_folders for path in folder.glob("lib*.so.*")
    }
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for path in paths:
            assert path is not None
            tar.add(path, f"build/bin/{path.name}")
        for library in sorted(libraries):
            # Real files under their longest names only, links for the names that loaders look up.
            tar.add(library, f"build/bin/{library.name}")
        for folder in engine.library_folders:
            for path in sorted(folder.glob("lib*.so")):
                if path.name.startswith("libllama-server-impl"):
                    tar.add(path, f"build/bin/{path.name}")
        for library in sorted(libraries):
            stem, _, version = library.name.partition(".so.")
            major = f"{stem}.so.{version.split('.')[0]}"
            if major not in {other.name for other in libraries}:
                info = tarfile.TarInfo(f"build/bin/{major}")
                info.type, info.linkname = tarfile.SYMTYPE, library.name
                tar.addfile(info)
    return buffer.getvalue()


def test_a_real_engine_is_installed_from_an_archive_and_works(
    stock_engine: EngineLocation, serve: Serve
) -> None:
    data = _release(stock_engine)
    url = serve("/llama-b10068-bin-test-x64.tar.gz", data)
    seen: list[tuple[str, int | None, int | None]] = []
    location = install_archive(url, _sum(data), lambda *step: seen.append(step))
    assert ("download", len(data), len(data)) in seen
    assert location.llama_server is not None
    assert location.llama_server.is_relative_to(engines_folder() / "llama-b10068-bin-test-x64")
    checked = check_engine(location)
    assert checked.problem is None
    assert checked.fingerprint is not None
    # No package tells it, but the archive's name does.
    assert checked.fingerprint.build == 10068
    assert location.llama_server in [found.llama_server for found in find_engines()]


def test_a_zip_keeps_what_is_executable(serve: Serve) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, mode in (("llama-server", 0o755), ("README", 0o644)):
            info = zipfile.ZipInfo(f"build/bin/{name}")
            info.external_attr = (stat.S_IFREG | mode) << 16
            zipped.writestr(info, b"#!/bin/sh\n")
        link = zipfile.ZipInfo("build/bin/llama-server-link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        zipped.writestr(link, "llama-server")
    data = buffer.getvalue()
    location = install_archive(serve("/engine.zip", data), _sum(data), _silent)
    assert location.llama_server is not None
    assert os.access(location.llama_server, os.X_OK)
    assert not os.access(location.llama_server.with_name("README"), os.X_OK) or os.getuid() == 0
    assert location.llama_server.with_name("llama-server-link").is_symlink()


def test_a_wrong_sum_is_refused_and_leaves_nothing(serve: Serve) -> None:
    data = _tar(("llama-server", b"x", None))
    url = serve("/engine.tar.gz", data)
    with pytest.raises(LinkcppError, match=f"SHA-256 is {_sum(data)}"):
        install_archive(url, "0" * 64, _silent)
    assert _nothing_left()


def test_a_download_that_ends_early_is_named_and_leaves_nothing(serve: Serve) -> None:
    data = _tar(("llama-server", b"x" * 1000, None))
    url = serve("/engine.tar.gz", data[:-20], length=len(data))
    with pytest.raises(LinkcppError, match="ended early"):
        install_archive(url, _sum(data), _silent)
    assert _nothing_left()


def test_a_missing_archive_is_told_with_its_status(serve: Serve) -> None:
    url = serve("/engine.tar.gz", b"", status=404)
    with pytest.raises(LinkcppError, match="404"):
        install_archive(url, "0" * 64, _silent)
    assert _nothing_left()


def test_nobody_at_the_address_is_told_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/engine.zip"
        with pytest.raises(LinkcppError, match="Cannot download"):
            install_archive(url, "0" * 64, _silent)


def test_a_redirect_is_followed(serve: Serve) -> None:
    data = _tar(("llama-server", b"#!/bin/sh\n", None))
    target = serve("/storage/object", data)
    url = serve("/engine.tar.gz", b"", status=302, headers={"Location": target})
    location = install_archive(url, _sum(data), _silent)
    assert location.llama_server == engines_folder() / "engine" / "llama-server"


@pytest.mark.parametrize("announces", [True, False])
def test_a_download_larger_than_allowed_is_cut(serve: Serve, announces: bool) -> None:
    data = _tar(("llama-server", os.urandom(5000), None))
    limits = ArchiveLimits(download_bytes=2000)
    url = serve("/engine.tar.gz", data, length=None if announces else -1)
    with pytest.raises(LinkcppError, match="larger than"):
        install_archive(url, _sum(data), _silent, limits)
    assert _nothing_left()


def test_an_archive_without_llama_server_is_refused(serve: Serve) -> None:
    data = _tar(("README", b"hello", None))
    with pytest.raises(LinkcppError, match="no llama-server"):
        install_archive(serve("/engine.tar.gz", data), _sum(data), _silent)
    assert _nothing_left()


def test_a_failed_installation_keeps_the_engine_that_was_there(serve: Serve) -> None:
    good = _tar(("llama-server", b"#!/bin/sh\n", None))
    install_archive(serve("/engine.tar.gz", good), _sum(good), _silent)
    with pytest.raises(LinkcppError):
        install_archive(serve("/engine.tar.gz", b"other"), _sum(good), _silent)
    assert (engines_folder() / "engine" / "llama-server").read_bytes() == b"#!/bin/sh\n"
    newer = _tar(("llama-server", b"#!/bin/sh\ntrue\n", None))
    install_archive(serve("/engine.tar.gz", newer), _sum(newer), _silent)
    assert (engines_folder() / "engine" / "llama-server").read_bytes() == b"#!/bin/sh\ntrue\n"
    assert sorted(path.name for path in engines_folder().iterdir()) == [".lock", "engine"]


@pytest.mark.parametrize(
    "members",
    [
        [("../outside", b"x", None)],
        [("a/../../outside", b"x", None)],
        [("/etc/outside", b"x", None)],
        [("link", None, "/etc"), ("llama-server", b"x", None)],
        [("link", None, "../.."), ("llama-server", b"x", None)],
        [("out", None, ".."), ("out/file", b"x", None)],
        [("b", None, "."), ("a", None, "b/../../x")],
        [("a", None, "b"), ("b", None, "..")],
        [("a", None, ".."), ("a/new/deep/link", None, "x")],
        [("twice", b"1", None), ("twice", b"2", None)],
        [("file", b"1", None), ("file/below", b"2", None)],
        [("file", b"1", None), ("file", None, "elsewhere")],
    ],
)
def test_a_member_that_leads_out_refuses_the_archive(
    tmp_path: Path, members: list[tuple[str, bytes | None, str | None]]
) -> None:
    inside = tmp_path / "top" / "inside"
    inside.mkdir(parents=True)
    with pytest.raises(LinkcppError, match="The archive is refused"):
        _unpack(_tar(*members), inside)
    assert {path.name for path in inside.parent.iterdir()} == {"inside", "archive"}
    assert {path.name for path in tmp_path.iterdir()} <= {"top", "linkcpp-home"}


def test_a_device_in_an_archive_refuses_it(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("null")
        info.type, info.devmajor, info.devminor = tarfile.CHRTYPE, 1, 3
        tar.addfile(info)
    with pytest.raises(LinkcppError, match="neither a file nor a folder"):
        _unpack(buffer.getvalue(), tmp_path / "inside")


def test_a_hard_link_out_of_the_archive_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("copy")
        info.type, info.linkname = tarfile.LNKTYPE, "../secret"
        tar.addfile(info)
    with pytest.raises(LinkcppError, match="leads out"):
        _unpack(buffer.getvalue(), tmp_path / "inside")
    assert not (tmp_path / "inside" / "copy").exists()


def test_a_bomb_is_stopped_at_the_limit(tmp_path: Path) -> None:
    limits = ArchiveLimits(unpacked_bytes=10**6)
    with pytest.raises(LinkcppError, match="larger than any"):
        _unpack(_tar(("zeros", bytes(10**7), None)), tmp_path / "inside", limits)
    written = sum(path.stat().st_size for path in (tmp_path / "inside").rglob("*"))
    assert written <= limits.unpacked_bytes
    with pytest.raises(LinkcppError, match="larger than any"):
        many = _tar(*((f"f{number}", b"", None) for number in range(20)))
        _unpack(many, tmp_path / "many", ArchiveLimits(entries=10))


def test_a_zip_that_lies_about_its_sizes_is_damaged(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("llama-server", b"x" * 1000)
    lying = buffer.getvalue().replace((1000).to_bytes(4, "little"), (9).to_bytes(4, "little"))
    with pytest.raises(LinkcppError):
        _unpack(lying, tmp_path / "inside")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=repeated(60))
@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_a_damaged_archive_is_an_error_in_one_sentence_or_whole(
    tmp_path: Path, position: int, value: int, cut: int
) -> None:
    data = bytearray(_tar(("bin/llama-server", os.urandom(200), None), ("lib", None, "bin")))
    data[position % len(data)] = value
    folder = Path(os.fsdecode(tmp_path)) / f"case-{time.monotonic_ns()}" / "inside"
    folder.parent.mkdir()
    try:
        _unpack(bytes(data[: len(data) - cut % 200]), folder)
    except LinkcppError as error:
        assert error.hint


@pytest.mark.parametrize("name", ["https://h/llama-b1-bin.tar.gz", "http://h/x/llama-b1-bin.zip?a"])
def test_the_folder_is_named_after_the_archive(name: str) -> None:
    assert archive_name(name) == "llama-b1-bin"


@pytest.mark.parametrize(
    "url", ["ftp://h/a.zip", "file:///etc/passwd", "h/a.zip", "https://h/", "http://["]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(LinkcppError, match="not the URL"):
        archive_name(url)


@pytest.mark.parametrize("host", ["127.0.0.1:1", "xn--", "a" * 300])
def test_an_address_that_cannot_be_had_is_told_without_its_secrets(host: str) -> None:
    url = f"http://user:hush@{host}/llama.zip?signature=hush"
    with pytest.raises(LinkcppError, match="Cannot download http") as refused:
        install_archive(url, "0" * 64, lambda *_: None)
    assert "hush" not in str(refused.value)


def test_a_sum_is_read_with_and_without_its_prefix() -> None:
    assert parse_sha256(f" SHA256:{'AB' * 32} ") == "ab" * 32
    with pytest.raises(LinkcppError, match="not a SHA-256"):
        parse_sha256("ab" * 16)


def test_two_installations_at_the_same_time_are_told_apart() -> None:
    with (
        staged_engine("first") as folder,
        pytest.raises(LinkcppError, match="Another"),
        staged_engine("second"),
    ):
        (folder / "x").touch()
    with staged_engine("first") as folder:
        (folder / "x").touch()
    assert (engines_folder() / "first" / "x").exists()


def test_what_a_killed_installation_left_is_removed_by_the_next() -> None:
    leftover = engines_folder() / ".partial-old"
    leftover.mkdir(parents=True)
    (leftover / "llama-server").touch()
    with staged_engine("next") as folder:
        (folder / "x").touch()
    assert not leftover.exists()


def test_ctrl_c_in_the_middle_of_a_download_leaves_nothing(
    serve: Serve, linkcpp_home: Path
) -> None:
    data = _tar(("llama-server", os.urandom(3_000_000), None))
    url = serve("/engine.tar.gz", data[:2_000_000], length=len(data), headers={"X-Stall": "1"})
    command = [sys.executable, "-m", "linkcpp.cli.main", "engine", "install", "archive", url]
    process = subprocess.Popen(
        [*command, "--sha256", _sum(data)],
        env={**os.environ, "LINKCPP_HOME": str(linkcpp_home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        while not any(path.stat().st_size for path in engines_folder().glob(".partial-*/.archive")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert _nothing_left()
