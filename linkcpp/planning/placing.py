"""Place a model's slots on devices: the problem that ``solver`` solves, made from offers and costs.

llama.cpp gives the first layers to the coordinator's CPU and the rest, in consecutive windows, to
the devices in the order of ``--device``; so the CPU's window comes first (it may be empty) and any
order of devices is open.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from linkcpp.planning.costs import Costs, Windows
from linkcpp.planning.evening import evened
from linkcpp.planning.offers import Offer
from linkcpp.planning.problem import Floats, Group, Integers, Problem
from linkcpp.planning.records import MAX_DEVICES
from linkcpp.planning.solver import solve


@dataclass(frozen=True)
class Held:
    """A window on a device; ``kept`` are its layers whose experts stay in the coordinator's RAM."""

    offer: Offer
    first: int
    last: int
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Who holds what, the time of a token in milliseconds, and a proved lower bound of it."""

    windows: tuple[Held, ...]
    token_ms: float
    bound_ms: float
    is_pipeline: bool


@dataclass(frozen=True)
class _Regime:
    """Placements under which llama.cpp allocates alike."""

    has_host_window: bool
    is_pipeline: bool
    max_devices: int


def place(
    costs: Costs,
    local: Sequence[Offer],
    remote: Sequence[Offer],
    *,
    min_remote: int,
    pipelines: bool,
    any_placement: bool = False,
) -> Placement | None:
    """Return the fastest placement, or ``None`` where nothing fits.

    ``local`` are the coordinator's devices with its CPU first. ``pipelines`` tells whether the
    build pipelines prompts over these devices, which takes memory where no layer is on the CPU.
    With ``any_placement`` the first that is found is returned.
    """
    best: Placement | None = None
    bound = np.inf
    for regime in _regimes(pipelines=pipelines, min_remote=min_remote):
        below = best.token_ms if best else np.inf
        found = _place_in(
            regime,
            costs,
            local,
            remote,
            min_remote=min_remote,
            below=below,
            any_placement=any_placement,
        )
        if found is not None and any_placement:
            return found
        if found is not None:
            bound = min(bound, found.bound_ms)
            best = min((best or found, found), key=lambda placement: placement.token_ms)
    return replace(best, bound_ms=min(float(bound), best.token_ms)) if best else None


def _regimes(*, pipelines: bool, min_remote: int) -> Iterator[_Regime]:
    yield _Regime(has_host_window=False, is_pipeline=pipelines, max_devices=MAX_DEVICES)
    yield _Regime(has_host_window=True, is_pipeline=False, max_devices=MAX_DEVICES)
    if pipelines and min_remote <= 1:
        yield _Regime(has_host_window=False, is_pipeline=False, max_devices=1)


@dataclass(frozen=True)
class _Candidate:
    """A group of the solver, whose devices they are, and how many layers each window keeps.

    ``fills`` is the part of a device's room that each window takes.
    """

    group: Group
    offers: tuple[Offer, ...]
    fills: Floats
    kept: Integers | None = None

    def held(self, member: int, first: int, last: int) -> Held:
        """One of the group's windows, on one of its devices."""
        count = 0
        if self.kept is not None:
            count = int(self.kept[self.group.row(first, last)])
        return Held(self.offers[member], first, last, tuple(range(first, first + count)))


def _place_in(
    regime: _Regime,
    costs: Costs,
    local: Sequence[Offer],
    remote: Sequence[Offer],
    *,
    min_remote: int,
    below: float,
    any_placement: bool,
) -> Placement | None:
    base = int(costs.host_bytes(is_pipeline=regime.is_pipeline)[0])
    budget = local[0].budget_bytes - base
    if budget < 0:
        return None
    candidates = list(_candidates(regime, costs, local, remote, ram_bytes=budget))
    problem = Problem(
        slots=costs.slots,
        slot_reads=np.array(
            [costs.read_window_bytes(slot, slot + 1) for slot in range(costs.slots)]
        ),
        groups=tuple(candidate.group for candidate in candidates),
        shared_budget_bytes=budget,
        max_devices=regime.max_devices,
        min_remote=min_remote,
        needs_host=regime.has_host_window,
    )
    solution = solve(problem, below=below, any_cover=any_placement)
    if solution is None:
        return None
    if not any_placement:
        fills = [candidate.fills for candidate in candidates]
        solution = evened(problem, fills, solution)
    used: Counter[int] = Counter()
    held = []
    for chosen in solution.windows:
        candidate = candidates[chosen.group]
        held.append(candidate.held(used[chosen.group], chosen.first, chosen.last))
        used[chosen.group] += 1
    return Placement(tuple(held), solution.cost, solution.bound, regime.is_pipeline)


def _candidates(
    regime: _Regime,
    costs: Costs,
    local: Sequence[Offer],
    remote: Sequence[Offer],
    *,
    ram_bytes: int,
) -> Iterator[_Candidate]:
    host, cards = local[0], local[1:]
    windows = costs.windows(is_pipeline=regime.is_pipeline)
    if regime.has_host_window:
        group = _host_group(costs, host, ram_bytes, regime)
        base = host.budget_bytes - ram_bytes
        yield _Candidate(group, (host,), (base + group.shared_bytes) / max(host.budget_bytes, 1))
    for card in cards:
        group, kept = _card_group(costs, card, host, windows, ram_bytes)
        sizes = windows.device_bytes[_rows(windows, group)]
        yield _Candidate(group, (card,), np.minimum(1.0, sizes / max(card.budget_bytes, 1)), kept)
    for offers in _alike(_undominated(remote, windows), windows):
        group = _remote_group(offers, windows)
        sizes = windows.device_bytes[_rows(windows, group)]
        yield _Candidate(group, tuple(offers), sizes / max(offers[0].budget_bytes, 1))


def _rows(windows: Windows, group: Group) -> Integers:
    """Where a group's windows are in the table of all, which is sorted by first and last slot."""
    slots = int(windows.last.max())
    rows: Integers = np.searchsorted(
        windows.first * (slots + 1) + windows.last, group.first * (slots + 1) + group.last
    )
    return rows


def _host_group(costs: Costs, host: Offer, ram_bytes: int, regime: _Regime) -> Group:
    """The coordinator's CPU: windows from slot 0, of which the RAM left takes so many."""
    sizes = costs.host_bytes(is_pipeline=regime.is_pipeline)
    sizes = sizes[1:] - sizes[0]
    windows = costs.windows(is_pipeline=regime.is_pipeline)
    # Windows are ordered by their first slot, so those that begin at slot 0 come first.
    times = windows.read_bytes[: costs.slots] / host.read_bytes_per_second * 1e3
    fits = sizes <= ram_bytes
    return Group(
        members=1,
        first=np.zeros(int(fits.sum()), dtype=np.int64),
        last=np.arange(1, costs.slots + 1)[fits],
        costs=times[fits],
        shared_bytes=sizes[fits],
        is_host=True,
    )


def _card_group(
    costs: Costs, card: Offer, host: Offer, windows: Windows, ram_bytes: int
) -> tuple[Group, Integers]:
    """A GPU of the coordinator: what does not fit leaves experts of its first layers in RAM.

    No more layers than needed, since the CPU computes them. Long prompts are still computed on the
    GPU, for which llama.cpp copies one layer's experts at a time there.
    """
    sizes = [costs.kept_expert_bytes(layer) for layer in costs.inventory.layers]
    reads = [costs.read_expert_bytes(layer) for layer in costs.inventory.layers]
    workspace = max(costs.buffers.layer_bytes, default=0)
    rows: list[tuple[int, int, float, int, int]] = []
    for first, last, size, read in zip(
        windows.first.tolist(),
        windows.last.tolist(),
        windows.device_bytes.tolist(),
        windows.read_bytes.tolist(),
        strict=True,
    ):
        count = kept_size = staging = 0
        kept_read = 0.0
        end = min(last, costs.layer_count)
        while size - kept_size + staging > card.budget_bytes and first + count < end:
            layer = first + count
            count += 1
            kept_size += sizes[layer]
            kept_read += reads[layer]
            staging = max(staging, sizes[layer])
        shared = kept_size + (workspace if kept_size else 0)
        if size - kept_size + staging <= card.budget_bytes and shared <= ram_bytes:
            time = card.read_ms(read - kept_read) + host.read_ms(kept_read)
            rows.append((first, last, time, shared, count))
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    whole = table[:, (0, 1, 3, 4)].astype(np.int64)
    group = Group(
        members=1,
        first=whole[:, 0],
        last=whole[:, 1],
        costs=table[:, 2],
        shared_bytes=whole[:, 2],
    )
    return group, whole[:, 3]


def _remote_group(offers: Sequence[Offer], windows: Windows) -> Group:
    offer = offers[0]
    fits = windows.device_bytes <= offer.budget_bytes
    rate = offer.link_bytes_per_second or np.inf
    times = (
        windows.read_bytes[fits] / offer.read_bytes_per_second * 1e3
        + offer.visit_ms
        + windows.link_bytes[fits] / rate * 1e3
    )
    return Group(
        members=len(offers),
        first=windows.first[fits],
        last=windows.last[fits],
        costs=times,
        shared_bytes=np.zeros(len(times), dtype=np.int64),
        is_remote=True,
    )


def _criteria(offers: Sequence[Offer], windows: Windows) -> Floats:
    """What tells offers apart, larger is better: which windows fit, speed, and cost of a visit."""
    sizes = np.unique(windows.device_bytes)
    budgets = np.array([offer.budget_bytes for offer in offers], dtype=np.int64)
    ends = (float(windows.link_bytes.min()), float(windows.link_bytes.max()))
    return np.column_stack(
        [
            np.searchsorted(sizes, budgets, side="right"),
            [offer.read_bytes_per_second for offer in offers],
            *([-offer.transfer_ms(end) for offer in offers] for end in ends),
        ]
    ).astype(np.float64)


def _undominated(offers: Sequence[Offer], windows: Windows) -> list[Offer]:
    """Drop offers that no best placement needs.

    An offer with as many others at least as good in everything as a placement can use is never
    needed: at least one of those is free, and takes its window at no more cost.
    """
    if not offers:
        return []
    criteria = _criteria(offers, windows)
    able = np.flatnonzero(criteria[:, 0] > 0)
    # Best first: whoever is at least as good in everything comes earlier (ties by position).
    ranked = able[np.lexsort((able, *(-criteria[able]).T))]
    kept: list[int] = []
    for index in ranked.tolist():
        better: npt.NDArray[np.bool_] = (criteria[kept] >= criteria[index]).all(axis=1)
        # Dropped offers are dominated by kept ones, so counting those is enough.
        if np.count_nonzero(better) < MAX_DEVICES:
            kept.append(index)
    return [offers[index] for index in sorted(kept)]


def _alike(offers: Sequence[Offer], windows: Windows) -> list[list[Offer]]:
    """Group offers that are equal in everything that matters; a plan need not tell them apart."""
    if not offers:
        return []
    groups: dict[tuple[float, ...], list[Offer]] = {}
    for offer, criteria in zip(offers, _criteria(offers, windows).tolist(), strict=True):
        groups.setdefault(tuple(criteria), []).append(offer)
    return list(groups.values())
