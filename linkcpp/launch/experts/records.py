"""What is known of the experts of a deployment while it lives."""

from enum import StrEnum
from pathlib import Path

from linkcpp.cluster.records import NodeId
from linkcpp.common.records import Record
from linkcpp.model.slices.segments import Segment
from linkcpp.node.records import WorkerId

UNCHECKED = "unchecked"


class WorkerPhase(StrEnum):
    """Where one share of the plan stands. ``AWAY`` workers are looked for until they are back."""

    WAITING = "waiting"
    SLICING = "slicing"
    STARTING = "starting"
    UP = "up"
    AWAY = "away"


class Counts(Record):
    """What one worker did; bytes count both directions, times are sums over its requests."""

    pair_count: int = 0
    request_count: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    failure_count: int = 0
    wait_ms: float = 0.0
    compute_ms: float = 0.0

    def plus(self, other: "Counts") -> "Counts":
        """Return the sums."""
        pairs = zip(self.model_dump().items(), other.model_dump().values(), strict=True)
        return Counts.model_validate({name: one + two for (name, one), two in pairs})


class WorkerState(Record):
    """One share of the plan, and the worker that computes it.

    ``holder`` is the worker's name in the dispatch process, a new one whenever a worker is started
    again; ``earlier`` is what those before it did. ``replica_count`` is how many workers that are
    up hold the least held expert of this share. ``is_linked`` tells whether the dispatch process
    uses it, ``link`` is its own word for that, ``link_detail`` says why not. ``checked`` is what
    the check of its rows found (``unchecked``: nothing to compare with). Slice sizes are in bytes
    of the file on the node; ``loaded_bytes`` are those of the coordinator's own experts that its
    rpc-server has. ``planned_memory_bytes`` is for the whole worker, ``resident_bytes`` what one on
    a node has of the main memory. ``transferred_bytes`` went over the network for it. ``way`` says
    in words how its node is reached, and why so; ``link_way`` the same of the worker's own link.
    """

    index: int
    node_id: NodeId
    node_name: str
    is_coordinator: bool
    device: str
    segments: tuple[Segment, ...]
    planned_weight_bytes: int
    planned_memory_bytes: int = 0
    resident_bytes: int = 0
    phase: WorkerPhase = WorkerPhase.WAITING
    detail: str | None = None
    url: str | None = None
    worker_id: WorkerId | None = None
    slice_bytes: int | None = None
    slice_done_bytes: int = 0
    transferred_bytes: int = 0
    slab_bytes: int | None = None
    loaded_bytes: int = 0
    start_count: int = 0
    replica_count: int = 0
    rtt_ms: float | None = None
    way: str | None = None
    link_way: str | None = None
    is_linked: bool = False
    link: str | None = None
    link_detail: str | None = None
    holder: str | None = None
    checked: str | None = None
    total: Counts = Counts()
    earlier: Counts = Counts()

    @property
    def mean_wait_ms(self) -> float:
        """From a request to its answer, as the dispatch process saw it."""
        return self.total.wait_ms / max(self.total.request_count, 1)

    @property
    def mean_compute_ms(self) -> float:
        """What of that the worker itself needed."""
        return self.total.compute_ms / max(self.total.request_count, 1)


class DispatchCounts(Record):
    """What the virtual device did since llama-server was started."""

    call_count: int = 0
    pair_count: int = 0
    rerouted_pair_count: int = 0
    failed_call_count: int = 0
    failed_pair_count: int = 0
    late_count: int = 0
    nonsense_count: int = 0
    spot_check_count: int = 0
    spot_pair_count: int = 0
    spot_skipped_count: int = 0
    difference_count: int = 0
    missing_expert_count: int = 0
    dropped_bytes: int = 0
    fallback_pair_count: int = 0
    fallback_loaded_count: int = 0


class ExpertsState(Record):
    """The experts of a deployment.

    The backbone file has ``backbone_bytes`` by its length, of which ``backbone_copied_bytes`` are
    not holes. ``has_fallback`` tells whether this machine computes what no worker does, with at
    most ``fallback_bytes`` of experts in memory; ``fallback_absence`` says why it does not.
    ``differences`` are sentences about workers whose rows differed from somebody else's.
    """

    workers: tuple[WorkerState, ...]
    backbone_path: Path | None = None
    backbone_bytes: int = 0
    backbone_copied_bytes: int = 0
    backbone_done_bytes: int = 0
    has_fallback: bool = False
    fallback_bytes: int = 0
    fallback_absence: str | None = None
    fallback_failure: str | None = None
    dispatch: DispatchCounts = DispatchCounts()
    differences: tuple[str, ...] = ()
