"""The files of a model while they are sent: opened, read, and held to be those that were hashed."""

import logging
import os

from linkcpp.hub.errors import ApiError
from linkcpp.hub.weights.catalogue import LocalFile
from linkcpp.hub.weights.layout import Extent
from linkcpp.model.source import FileSource

_log = logging.getLogger(__name__)


class OpenFiles:
    """The files of a content, held to be those that were hashed. Its methods block."""

    def __init__(self, files: tuple[LocalFile, ...], needed: set[int]) -> None:
        self._files = files
        self._descriptors: dict[int, int] = {}
        try:
            for number in needed:
                self._descriptors[number] = _open(files[number])
                self._check(number)
        except BaseException:
            self.close()
            raise

    def read(self, piece: list[Extent]) -> bytes:
        """Read the bytes of a piece.

        Raises:
            ApiError: a file was changed, or cannot be read.
        """
        parts = []
        for extent in piece:
            if extent.file is None:
                parts.append(extent.content or bytes(extent.size_bytes))
                continue
            try:
                part = os.pread(
                    self._descriptors[extent.file], extent.size_bytes, extent.offset_bytes
                )
            except OSError as error:
                raise _changed(error) from error
            if len(part) != extent.size_bytes:
                raise _changed()
            parts.append(part)
        # Looked at after the reading: what was read before a change is as it was hashed.
        for number in {extent.file for extent in piece if extent.file is not None}:
            self._check(number)
        return b"".join(parts)

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def _check(self, number: int) -> None:
        status = os.fstat(self._descriptors[number])
        if FileSource.version_of(status) != self._files[number].version:
            raise _changed()


def _open(file: LocalFile) -> int:
    try:
        return os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _changed(error) from error


def _changed(error: OSError | None = None) -> ApiError:
    if error is not None:
        _log.error("a model's file cannot be read: %s", error)
    return ApiError(
        409,
        "model_changed",
        "The model's file on the hub's disk is gone, or is not the one that was added.",
        hint="The hub's owner can `linkcpp hub models remove` it and add it again.",
    )
