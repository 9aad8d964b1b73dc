"""What is asked of a deployment, and what is known of it while it lives.

Both are files of the deployment's folder: ``request.json`` is written once by ``launch``,
``state.json`` by the supervisor whenever something happened.
"""

from enum import StrEnum

from pydantic import Field

from linkcpp.cluster.records import NodeId
from linkcpp.common.processes import ProcessIdentity
from linkcpp.common.records import Record
from linkcpp.launch.experts.records import ExpertsState
from linkcpp.node.records import ServerId
from linkcpp.planning.records import Plan
from linkcpp.worker.sampling import DEFAULT_RATE

STATE_SCHEMA_VERSION = 2
DEFAULT_PATIENCE_SECONDS = 20.0


class LaunchRequest(Record):
    """Everything that the supervisor needs to know, all paths absolute.

    ``api_key_file`` is ``None`` where the API is open, which only loopback may be. In mode
    ``experts`` this machine computes what no worker does, with at most ``fallback_bytes`` of
    experts in memory (0: it does not; ``None``: what the plan leaves free); where that cannot be,
    a request waits for a worker for ``patience_seconds``. ``spot_check_rate`` is which part of the
    workers' rows somebody else computes too. With ``keeps_trying`` a launch waits for
    what is missing instead of telling so and ending: nobody is there to be told.
    """

    schema_version: int = STATE_SCHEMA_VERSION
    name: str
    plan: Plan
    model_path: str
    host: str
    port: int
    api_key_file: str | None
    templates_folder: str | None
    node_urls: tuple[str, ...] = ()
    use_mdns: bool = True
    fallback_bytes: int | None = Field(default=None, ge=0)
    patience_seconds: float = Field(default=DEFAULT_PATIENCE_SECONDS, ge=0, allow_inf_nan=False)
    spot_check_rate: float = Field(default=DEFAULT_RATE, ge=0, le=1)
    keeps_trying: bool = False


class Phase(StrEnum):
    """Where a deployment stands; the phases up to ``READY`` come in this order."""

    CHECKING = "checking"
    PREPARING = "preparing"
    FINDING_NODES = "finding_nodes"
    STARTING_SERVERS = "starting_servers"
    LOADING = "loading"
    WARMING_UP = "warming_up"
    PROVING = "proving"
    READY = "ready"
    RECOVERING = "recovering"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether nothing runs any more."""
        return self in (Phase.STOPPED, Phase.FAILED)


class StageState(Record):
    """One window of the plan and what its device was seen to hold, in bytes.

    ``held_weight_bytes`` is what the node's agent counted as written; the ``*_buffer_bytes`` are
    what llama-server logged (rounded by it to 10 KiB); ``None`` where nothing was told yet.
    ``resident_bytes`` is what the rpc-server and its keeper have of the node's main memory.
    ``carried_bytes`` went over the link in both directions since the stage started. ``way`` says
    in words how a node of a hub is reached, and why so.
    """

    index: int
    node_id: NodeId
    node_name: str
    is_coordinator: bool
    device: str
    first_layer: int
    layer_count: int
    holds_output: bool
    planned_weight_bytes: int
    planned_memory_bytes: int
    url: str | None = None
    server_id: ServerId | None = None
    endpoint: str | None = None
    held_weight_bytes: int | None = None
    allocated_bytes: int | None = None
    model_buffer_bytes: int | None = None
    kv_buffer_bytes: int | None = None
    recurrent_buffer_bytes: int | None = None
    compute_buffer_bytes: int | None = None
    resident_bytes: int = 0
    carried_bytes: int = 0
    rtt_ms: float | None = None
    way: str | None = None


class Notice(Record):
    """One line of a deployment's history; ``at`` is in seconds since 1970."""

    at: float
    text: str


class DeploymentState(Record):
    """A deployment as its supervisor last wrote it.

    The file alone does not prove that anything runs: ``status`` also looks whether the supervisor
    is still the process of ``supervisor``. ``has_loaded``: llama-server ran at least once; before
    that there is nothing of it that anybody would want to look at later. ``chat_url`` is
    llama-server's own chat page for browsers, where its build has one.
    """

    schema_version: int = STATE_SCHEMA_VERSION
    name: str
    model_name: str
    mode: str
    phase: Phase
    detail: str | None = None
    hint: str | None = None
    supervisor: ProcessIdentity | None = None
    llama_server: ProcessIdentity | None = None
    api_url: str | None = None
    chat_url: str | None = None
    api_key_file: str | None = None
    stages: tuple[StageState, ...] = ()
    experts: ExpertsState | None = None
    coordinator_buffer_bytes: int = 0
    created_at: float
    updated_at: float
    ready_at: float | None = None
    has_loaded: bool = False
    restart_count: int = 0
    excluded_nodes: tuple[str, ...] = ()
    prompt_tokens_per_second: float | None = None
    tokens_per_second: float | None = None
    notices: tuple[Notice, ...] = ()
