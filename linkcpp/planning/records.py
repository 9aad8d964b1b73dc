"""The plan: one frozen value from which every command line derives."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from linkcpp.cluster.records import NodeId
from linkcpp.common.records import Record
from linkcpp.engine.records import EngineFingerprint
from linkcpp.model.slices.segments import Segment
from linkcpp.planning.routing_counts import RoutingCounts

SCHEMA_VERSION = 1
# llama-server refuses `-ts` with 16 entries, and its scheduler has 16 backends, the CPU among them.
MAX_DEVICES = 15

# JSON has no infinity: what is not finite could not be read back.
Finite = Annotated[float, Field(allow_inf_nan=False)]


class PlanMode(StrEnum):
    """How a model is spread. ``auto`` takes the faster of ``single`` and ``layers``."""

    AUTO = "auto"
    SINGLE = "single"
    LAYERS = "layers"
    EXPERTS = "experts"


class CacheType(StrEnum):
    """Element types of the KV cache that llama-server accepts."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q5_1 = "q5_1"
    Q5_0 = "q5_0"
    Q4_1 = "q4_1"
    Q4_0 = "q4_0"
    IQ4_NL = "iq4_nl"


class PlanOptions(Record):
    """What the user asks of a deployment.

    ``context_tokens`` is per sequence; ``parallel`` is the number of sequences (slots).
    ``reserve_bytes`` is left free on every device besides everything that is counted; ``None``
    leaves 5 % of what the device offers, at most 512 MiB. ``minimum_stages`` spreads the layers
    over at least so many devices of nodes, or all that there are if fewer (mode ``layers`` only).
    ``checkpoint_count`` is how many snapshots of the recurrent state and of sliding windows
    llama-server keeps for each slot, so that a chat's next turn need not read the whole prompt.
    ``replicas`` is how many holders each expert should have (mode ``experts`` only).
    """

    mode: PlanMode = PlanMode.AUTO
    context_tokens: int = Field(default=4096, ge=1)
    parallel: int = Field(default=1, ge=1)
    cache_type_k: CacheType = CacheType.F16
    cache_type_v: CacheType = CacheType.F16
    batch_tokens: int = Field(default=2048, ge=1)
    ubatch_tokens: int = Field(default=512, ge=1)
    reserve_bytes: int | None = Field(default=None, ge=0)
    minimum_stages: int = Field(default=1, ge=1)
    checkpoint_count: int = Field(default=4, ge=0)
    replicas: int = Field(default=1, ge=1)
    repack: bool = False


class ModelReference(Record):
    """Which model a plan is for. ``digest`` is ``None`` when it was planned from a preset."""

    name: str
    source: str
    digest: str | None
    architecture: str
    layer_count: int
    weight_bytes: int


class DeviceMemory(Record):
    """What a plan puts on one device, in bytes, against what the device offers.

    ``checkpoint_bytes`` is for snapshots of states that cannot be rewound, which llama-server keeps
    in the coordinator's RAM. ``program_bytes`` is what the coordinator's programs take themselves,
    linkcpp's own and llama.cpp's.
    """

    weight_bytes: int
    kv_bytes: int
    recurrent_bytes: int
    compute_bytes: int
    checkpoint_bytes: int = 0
    program_bytes: int = 0
    reserve_bytes: int
    available_bytes: int

    @property
    def used_bytes(self) -> int:
        """All that the deployment takes on the device, without the reserve."""
        kept = self.kv_bytes + self.recurrent_bytes + self.checkpoint_bytes
        return self.weight_bytes + kept + self.compute_bytes + self.program_bytes


class Stage(Record):
    """A window of consecutive layers on one device of one node, in the order of the layers.

    Layers ``first_layer`` to ``first_layer + layer_count - 1``. ``holds_output`` marks the stage
    that also has the output head. ``expert_layers_in_ram`` are layers of this window whose
    experts stay in the coordinator's RAM (only on the coordinator's own devices).
    ``compute_ms`` and ``network_ms`` are the stage's part of the time of one decoded token.
    """

    node_id: NodeId
    node_name: str
    is_coordinator: bool
    device: str
    is_cpu: bool
    first_layer: int
    layer_count: int
    holds_output: bool
    expert_layers_in_ram: tuple[int, ...] = ()
    memory: DeviceMemory
    compute_ms: Finite = 0.0
    network_ms: Finite = 0.0

    @property
    def slot_count(self) -> int:
        """What llama.cpp counts for ``-ngl`` and ``-ts``: the layers, and one for the output."""
        return self.layer_count + self.holds_output


class ExpertShare(Record):
    """The experts that one device of one node computes (mode ``experts``).

    ``memory.weight_bytes`` is the sum of the share's slabs, which is also what the node fetches
    besides a header. ``unit_count`` is how many (layer, expert) units it holds; of these
    ``replica_count`` are computed elsewhere as long as all goes well. ``work_share`` is its part of
    all experts' work then. ``compute_ms`` and ``network_ms`` are what a token takes here if it is
    asked in every layer of which it has a part.
    """

    node_id: NodeId
    node_name: str
    is_coordinator: bool
    device: str
    segments: tuple[Segment, ...]
    memory: DeviceMemory
    unit_count: int = 0
    replica_count: int = 0
    work_share: Finite = 0.0
    compute_ms: Finite = 0.0
    network_ms: Finite = 0.0


class ExpertExpectation(Record):
    """What mode ``experts`` predicts besides, of one decoded token.

    ``typical_token_ms`` is a token's mean where a holder of experts counts by how likely it is
    asked. There is one round trip for each layer with experts on other machines. Bytes go over
    links, in both directions. ``short_unit_count`` of all ``unit_count`` (layer, expert) units have
    fewer holders than were asked for.
    """

    typical_token_ms: Finite
    round_trip_count: int
    sent_bytes: Finite
    received_bytes: Finite
    unit_count: int
    short_unit_count: int


class Expectation(Record):
    """What the plan predicts for one decoded token, in milliseconds.

    ``optimality_gap`` bounds how much slower the plan may be than the best one, relative to it;
    0 means proved optimal. ``assumptions`` name speeds and links that were not measured.
    """

    token_ms: Finite
    compute_ms: Finite
    network_ms: Finite
    optimality_gap: Finite
    objective: str
    assumptions: tuple[str, ...] = ()
    experts: ExpertExpectation | None = None


class Plan(Record):
    """Who holds what. Everything on a command line that concerns placement derives from this.

    ``coordinator_memory`` is what the coordinator's RAM holds in total (input embeddings, its CPU
    window, experts kept in RAM). In mode ``experts`` the one stage is the backbone, and
    ``expert_shares`` say who computes which experts. ``node_urls`` are hints for every node that
    the plan could have used; a node is found again by its id. ``reason`` says in words why this
    placement was taken. ``routing_counts`` are those that it was made with: a plan that takes its
    place heeds them too.
    """

    schema_version: int = SCHEMA_VERSION
    mode: PlanMode
    model: ModelReference
    options: PlanOptions
    coordinator_id: NodeId
    coordinator_name: str
    engine: EngineFingerprint
    stages: tuple[Stage, ...]
    expert_shares: tuple[ExpertShare, ...] = ()
    coordinator_memory: DeviceMemory
    node_urls: dict[NodeId, tuple[str, ...]]
    expectation: Expectation
    reason: str = ""
    routing_counts: RoutingCounts | None = None


class Shortfall(Record):
    """What is short, where, and by how much."""

    where: str
    what: str
    needed_bytes: int
    available_bytes: int

    @property
    def short_bytes(self) -> int:
        """How much is missing."""
        return self.needed_bytes - self.available_bytes


class Remedy(Record):
    """A change after which the plan fits; ``options`` are what to ask for, if it is an option."""

    text: str
    options: PlanOptions | None = None


class Infeasible(Record):
    """Why there is no plan, and the changes with which there would be, the smallest first.

    ``problem`` is a sentence where it is not memory that is short; there are no shortfalls then.
    """

    mode: PlanMode
    shortfalls: tuple[Shortfall, ...]
    remedies: tuple[Remedy, ...]
    problem: str | None = None
