"""Room for slices on a node's disk: what its owner gives, and what can be taken back from it."""

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from linkcpp.common.units import format_bytes
from linkcpp.node.limits import RefusedError
from linkcpp.node.records import SliceId, SliceState
from linkcpp.node.stored_slice import StoredSlice

# Left free on the disk whatever the owner allows: a full disk stops more than this agent.
RESERVE_BYTES = 512 * 2**20
# A slice is not removed for another one so soon after it was used: its worker may just be started.
KEPT_SECONDS = 60.0

_AT_REST = (SliceState.READY, SliceState.FAILED, SliceState.RECEIVING)


class SliceQuota:
    """What is left for slices. The least recently used ones give way where no worker uses them."""

    def __init__(
        self, folder: Path, limit_bytes: int | None, slices: Mapping[SliceId, StoredSlice]
    ) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._slices = slices

    def free_bytes(self) -> int:
        """How large one more slice may be with nothing removed for it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free - RESERVE_BYTES
        except OSError:
            return 0
        used = 0
        for item in self._slices.values():
            size = _size(item)
            used += size
            free -= size - item.received_bytes
        left = free if self._limit_bytes is None else min(free, self._limit_bytes - used)
        return max(left, 0)

    def offered_bytes(self) -> int:
        """How large one more slice may be."""
        return self._offered_bytes(None)

    def room_bytes(self) -> int:
        """How much all slices of a deployment may take, once what nobody uses now may go."""
        return self.free_bytes() + sum(item.received_bytes for _, item in self._at_rest())

    def check(self, size_bytes: int, kept: SliceId) -> None:
        """See that so much more fits if all are removed that can be, but ``kept``.

        Raises:
            RefusedError: it does not.
        """
        offered = self._offered_bytes(kept)
        if size_bytes > offered:
            hint = (
                "Delete slices there, raise the owner's limit (`linkcpp node --slices`), or ask "
                "for fewer experts."
            )
            if size_bytes <= self.room_bytes():
                hint = (
                    "A slice that nobody uses may go for it, but not sooner than "
                    f"{KEPT_SECONDS:.0f} seconds after it was used: ask again then."
                )
            raise RefusedError(
                507,
                "insufficient_storage",
                f"The slice takes {format_bytes(size_bytes)}, but this node has "
                f"{format_bytes(offered)} left for slices.",
                hint=hint,
            )

    def first_to_go(self, size_bytes: int, kept: SliceId) -> StoredSlice | None:
        """Name the slice to remove next so that so much more fits; ``None`` where it does.

        ``kept`` is the one that the room is for.
        """
        if size_bytes <= self.free_bytes():
            return None
        return next(iter(self._removable(kept)), None)

    def _offered_bytes(self, kept: SliceId | None) -> int:
        return self.free_bytes() + sum(item.received_bytes for item in self._removable(kept))

    def _removable(self, kept: SliceId | None) -> list[StoredSlice]:
        """The slices that may go, least recently used first."""
        before = time.time() - KEPT_SECONDS
        found = sorted(self._at_rest(), key=lambda pair: pair[0])
        return [item for used, item in found if used < before and item.slice_id != kept]

    def _at_rest(self) -> Iterator[tuple[float, StoredSlice]]:
        """The slices that nobody uses or changes, each with when it was used last."""
        for item in self._slices.values():
            if item.state in _AT_REST and not item.user_count and not item.lock.locked():
                yield item.last_used, item


def _size(item: StoredSlice) -> int:
    return max(item.file_bytes or 0, item.received_bytes)
