"""Release archives: fetched from a URL, compared with a SHA-256, unpacked with suspicion."""

import gzip
import hashlib
import hmac
import lzma
import os
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import unquote, urlsplit

import httpx

from linkcpp.common.errors import LinkcppError
from linkcpp.common.network_errors import in_words
from linkcpp.common.proxies import ProxiedTransport
from linkcpp.common.units import format_bytes
from linkcpp.engine.staging import ProgressReport

_CHUNK_BYTES = 2**20
_LINK_TARGET_BYTES = 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What the readers raise on bytes that they cannot read; RuntimeError: an encrypted zip.
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    ValueError,
    RuntimeError,
)
_TIMEOUT = httpx.Timeout(30.0, connect=15.0)


@dataclass(frozen=True)
class ArchiveLimits:
    """Bounds on what an archive may cost: a release of llama.cpp is well below all of them."""

    download_bytes: int = 2 * 2**30
    unpacked_bytes: int = 8 * 2**30
    entries: int = 20_000


@dataclass(frozen=True)
class _Entry:
    """One member of an archive; ``link`` is the target of a link, relative to the entry's folder.

    A hard link's target counts from the archive's top (``is_hard_link``).
    """

    parts: tuple[str, ...]
    size_bytes: int
    is_executable: bool
    link: str | None = None
    is_hard_link: bool = False


def archive_name(url: str) -> str:
    """Name the engine's folder after the archive: ``llama-b10068-bin-ubuntu-x64``.

    Raises:
        LinkcppError: it is not an HTTP(S) URL that names a file.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    name = PurePosixPath(unquote(parts.path)).name
    name = re.sub(r"\.(tar\.gz|tgz|tar\.xz|tar|zip)$", "", name)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", name).strip("._")
    if parts.scheme not in ("http", "https") or not parts.hostname or not name:
        raise LinkcppError(
            f"{url!r} is not the URL of an archive.",
            hint="Give the https:// address of a llama.cpp release's .tar.gz or .zip.",
        )
    return name[:100]


def parse_sha256(text: str) -> str:
    """Read a SHA-256 as 64 hex digits, with or without ``sha256:`` before them.

    Raises:
        LinkcppError: it is not one.
    """
    digest = text.strip().lower().removeprefix("sha256:")
    if not _SHA256.fullmatch(digest):
        raise LinkcppError(
            f"{text!r} is not a SHA-256.",
            hint="It is 64 hex digits; the release page shows them beside each file.",
        )
    return digest


def fetch_archive(
    url: str, sha256: str, target: Path, report: ProgressReport, limits: ArchiveLimits
) -> None:
    """Stream ``url`` into ``target`` and compare its SHA-256.

    Raises:
        LinkcppError: it cannot be had, ends early, is too large, or is another file.
        OSError: the disk is full.
    """
    digest = hashlib.sha256()
    public = _without_secrets(url)
    try:
        with (
            httpx.Client(
                transport=ProxiedTransport(),
                follow_redirects=True,
                max_redirects=5,
                timeout=_TIMEOUT,
            ) as client,
            # The bytes as they are stored: a content coding would make lengths and sums differ.
            client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response,
            target.open("xb") as file,
        ):
            response.raise_for_status()
            for chunk, done_bytes, total_bytes in _bounded_chunks(response, public, limits):
                digest.update(chunk)
                file.write(chunk)
                report("download", done_bytes, total_bytes)
    except httpx.HTTPStatusError as error:
        raise LinkcppError(
            f"{public} answers {error.response.status_code} {error.response.reason_phrase}.",
            hint="Look up the address on the release page.",
        ) from error
    except httpx.RemoteProtocolError as error:
        raise LinkcppError(f"The download of {public} ended early.", hint="Try again.") from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise LinkcppError(
            f"Cannot download {public}: {in_words(error)}.",
            hint="Check the address and the network.",
        ) from error
    if not hmac.compare_digest(digest.hexdigest(), sha256):
        raise LinkcppError(
            f"{public} is not the expected file: its SHA-256 is {digest.hexdigest()}.",
            hint="Compare the sum with the one on the release page; do not install what differs.",
        )


def unpack_archive(
    archive: Path, folder: Path, report: ProgressReport, limits: ArchiveLimits
) -> None:
    """Unpack a tar or zip archive into ``folder``, and nothing anywhere else.

    Files are written first, links made after them and then resolved: no file is ever written
    through a link, and no link leads out. Devices, sockets and names that point out of the folder
    refuse the whole archive.

    Raises:
        LinkcppError: it is not an archive, damaged, too large, or holds such a member.
        OSError: the disk is full.
    """
    unpack = _unpack_zip if zipfile.is_zipfile(archive) else _unpack_tar
    links: list[_Entry] = []
    done_bytes = 0
    try:
        for count, (entry, content) in enumerate(unpack(archive), start=1):
            done_bytes += entry.size_bytes
            if count > limits.entries or done_bytes > limits.unpacked_bytes:
                raise _refused("it is larger than any llama.cpp release")
            if entry.link is not None:
                links.append(entry)
            elif content is None:
                folder.joinpath(*entry.parts).mkdir(parents=True, exist_ok=True)
            else:
                _write_file(folder, entry, content)
            report("unpack", done_bytes, None)
    except _DAMAGED as error:
        raise LinkcppError(
            f"The archive is damaged or of no known kind: {error}.",
            hint="Give a .tar.gz or .zip of a llama.cpp release.",
        ) from error
    except (FileExistsError, NotADirectoryError):
        raise _refused("it names the same file twice") from None
    _make_links(folder, links, limits.unpacked_bytes - done_bytes)


def _without_secrets(url: str) -> str:
    """The address for messages, without a password before the host or a signature behind it."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()


def _bounded_chunks(
    response: httpx.Response, url: str, limits: ArchiveLimits
) -> Iterator[tuple[bytes, int, int | None]]:
    announced = response.headers.get("Content-Length", "")
    total_bytes = int(announced) if announced.isascii() and announced.isdigit() else None
    done_bytes = 0
    if (total_bytes or 0) > limits.download_bytes:
        raise _too_large(url, limits)
    for chunk in response.iter_raw(_CHUNK_BYTES):
        done_bytes += len(chunk)
        if done_bytes > limits.download_bytes:
            raise _too_large(url, limits)
        yield chunk, done_bytes, total_bytes


def _unpack_tar(archive: Path) -> Iterator[tuple[_Entry, IO[bytes] | None]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            link = member.linkname if member.issym() or member.islnk() else None
            if not (member.isreg() or member.isdir() or link is not None):
                raise _refused(f"{member.name!r} is neither a file nor a folder")
            if member.size < 0:
                raise tarfile.ReadError(f"{member.name!r} has a negative size")
            entry = _Entry(
                parts=_safe_parts(member.name),
                size_bytes=member.size if member.isreg() else 0,
                is_executable=bool(member.mode & stat.S_IXUSR),
                link=link,
                is_hard_link=member.islnk(),
            )
            yield entry, tar.extractfile(member) if member.isreg() else None


def _unpack_zip(archive: Path) -> Iterator[tuple[_Entry, IO[bytes] | None]]:
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            mode = member.external_attr >> 16
            parts = _safe_parts(member.filename)
            if member.is_dir():
                yield _Entry(parts, 0, is_executable=True), None
                continue
            with zipped.open(member) as content:
                if stat.S_ISLNK(mode):
                    target = content.read(_LINK_TARGET_BYTES + 1).decode(errors="strict")
                    yield _Entry(parts, 0, is_executable=False, link=target), None
                elif stat.S_IFMT(mode) in (0, stat.S_IFREG):
                    is_executable = bool(mode & stat.S_IXUSR)
                    yield _Entry(parts, member.file_size, is_executable=is_executable), content
                else:
                    raise _refused(f"{member.filename!r} is neither a file nor a folder")


def _safe_parts(name: str) -> tuple[str, ...]:
    path = PurePosixPath(name)
    parts = tuple(part for part in path.parts if part != ".")
    if path.is_absolute() or ".." in parts or "\\" in name or "\0" in name:
        raise _refused(f"the name {name!r} leads out of the folder")
    return parts


def _write_file(folder: Path, entry: _Entry, content: IO[bytes]) -> None:
    if not entry.parts:
        raise _refused("a file has no name")
    target = folder.joinpath(*entry.parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    remaining_bytes = entry.size_bytes
    with target.open("xb") as file:
        # The archive's own number of bytes was counted against the limit, so no more is taken.
        while remaining_bytes and (chunk := content.read(min(_CHUNK_BYTES, remaining_bytes))):
            file.write(chunk)
            remaining_bytes -= len(chunk)
    if remaining_bytes:
        raise EOFError(f"{'/'.join(entry.parts)} ends early")
    target.chmod(0o755 if entry.is_executable else 0o644)


def _make_links(folder: Path, links: list[_Entry], spare_bytes: int) -> None:
    root = folder.resolve()
    made: list[Path] = []
    for entry in links:
        name = "/".join(entry.parts)
        target = root.joinpath(*entry.parts)
        # Asked before a folder is made: an earlier link may lead out.
        if os.path.realpath(target.parent) != str(target.parent):
            raise _refused(f"the link {name!r} lies behind a link")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink() or target.exists() or not entry.link:
            raise _refused(f"the link {name!r} is there already")
        if not entry.is_hard_link:
            target.symlink_to(entry.link)
            made.append(target)
            continue
        original = root.joinpath(*_safe_parts(entry.link))
        if os.path.realpath(original) != str(original) or not original.is_file():
            raise _refused(f"the link {name!r} leads nowhere")
        spare_bytes -= original.stat().st_size
        if spare_bytes < 0:
            raise _refused("it is larger than any llama.cpp release")
        shutil.copy2(original, target)
    for link in made:
        if not Path(os.path.realpath(link)).is_relative_to(root):
            raise _refused(f"the link {link.name!r} leads out of the folder")


def _refused(reason: str) -> LinkcppError:
    return LinkcppError(
        f"The archive is refused: {reason}.",
        hint="Take it from llama.cpp's own release page.",
    )


def _too_large(url: str, limits: ArchiveLimits) -> LinkcppError:
    return LinkcppError(
        f"{url} is larger than {format_bytes(limits.download_bytes)}.",
        hint="Give the address of a llama.cpp release archive.",
    )
