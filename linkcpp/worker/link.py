"""A stream of compute frames cut into frames, without a copy where one read brings several."""

import numpy as np

from linkcpp.worker.frames import HEADER_BYTES, Header, Limits, parse_header

_BUFFER_BYTES = 1 << 18


class FrameBuffer:
    """Read into ``space()``, tell ``received()``, then take frames with ``next()`` until ``None``.

    A payload is a view that is valid until the next ``space()``. A frame larger than the buffer
    gets memory of its own once its header was checked against the limits.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._header: Header | None = None
        self._large: memoryview | None = None
        self._large_end = 0

    @property
    def is_between_frames(self) -> bool:
        """Whether nothing of a frame has arrived that was not taken."""
        return self._header is None and self._start == self._end

    def space(self) -> memoryview:
        """Return where the next bytes go; never empty once all frames were taken."""
        if self._large is not None:
            return self._large[self._large_end :]
        if self._start:
            waiting = self._end - self._start
            if waiting:
                self._view[:waiting] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, waiting
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """Tell that ``count`` bytes were put into what ``space()`` gave."""
        if self._large is not None:
            self._large_end += count
        else:
            self._end += count

    def next(self) -> tuple[Header, memoryview] | None:
        """Return the next whole frame.

        Raises:
            FrameError: the bytes are not a frame within the limits; nothing after it can be read.
        """
        if self._header is None:
            if self._end - self._start < HEADER_BYTES:
                return None
            self._header = parse_header(self._view, self._limits, self._start)
            self._start += HEADER_BYTES
        header = self._header
        payload = self._large_payload(header) if self._large else self._small_payload(header)
        if payload is None:
            return None
        self._header = None
        return header, payload

    def _small_payload(self, header: Header) -> memoryview | None:
        size = header.payload_bytes
        waiting = self._end - self._start
        if waiting >= size:
            payload = self._view[self._start : self._start + size]
            self._start += size
            return payload
        if size > _BUFFER_BYTES - HEADER_BYTES:
            self._large = np.empty(size, np.uint8).data
            self._large[:waiting] = self._view[self._start : self._end]
            self._large_end = waiting
            self._start = self._end = 0
        return None

    def _large_payload(self, header: Header) -> memoryview | None:
        if self._large is None or self._large_end < header.payload_bytes:
            return None
        payload, self._large = self._large, None
        return payload
