"""The covering problem that placement comes down to, and its solutions, as plain data.

A *slot* is a layer, or the output. A *window* ``[first, last)`` of slots is offered by a *group*
(interchangeable devices) at a cost; which windows a group can hold is decided before. Wanted is a
path of windows from slot 0 to the last one that uses each group no more often than it has members.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Interchangeable devices and the windows that one of them can hold.

    ``costs`` are milliseconds, ``shared_bytes`` what a window takes of the memory that all groups
    share (the coordinator's RAM). ``is_host`` marks the coordinator's CPU, which is not a device to
    llama.cpp; ``is_remote`` a device that is reached over a link.
    """

    members: int
    first: Integers
    last: Integers
    costs: Floats
    shared_bytes: Integers
    is_host: bool = False
    is_remote: bool = False

    def row(self, first: int, last: int) -> int:
        """Where a window of the group is in its arrays."""
        return int(np.flatnonzero((self.first == first) & (self.last == last))[0])

    def only(self, wanted: npt.NDArray[np.bool_]) -> "Group":
        """The group with some of its windows."""
        return replace(
            self,
            first=self.first[wanted],
            last=self.last[wanted],
            costs=self.costs[wanted],
            shared_bytes=self.shared_bytes[wanted],
        )


@dataclass(frozen=True)
class Problem:
    """What to cover, with what, within which limits.

    ``needs_host`` wants a window on the coordinator's CPU. ``max_devices`` bounds the windows that
    are not on it, ``min_remote`` the windows behind links.
    ``slot_reads`` is what one token reads of each slot, by which slots are alike or not.
    """

    slots: int
    slot_reads: Floats
    groups: tuple[Group, ...]
    shared_budget_bytes: int
    max_devices: int
    min_remote: int = 0
    needs_host: bool = False

    def has_room_for(self, windows: "Sequence[Chosen]") -> bool:
        """Whether the shared memory suffices for windows."""
        groups = [self.groups[window.group] for window in windows]
        total = sum(
            int(group.shared_bytes[group.row(window.first, window.last)])
            for group, window in zip(groups, windows, strict=True)
        )
        return total <= self.shared_budget_bytes


@dataclass(frozen=True)
class Chosen:
    """A window of the solution: which group's, and which slots."""

    group: int
    first: int
    last: int


@dataclass(frozen=True)
class Solution:
    """The windows in order, their total cost, and a proved lower bound of any solution's cost."""

    windows: tuple[Chosen, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How far the cost may be above the optimum, relative to the cost."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0
