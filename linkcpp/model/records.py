"""What a model is made of, by layer and expert: the planner's only view of a model."""

from enum import StrEnum

from linkcpp.common.records import Record


class TensorRole(StrEnum):
    """What a tensor does; the key by which bytes are counted."""

    EMBEDDING = "embedding"
    OUTPUT = "output"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    NORM = "norm"
    ROUTER = "router"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    FEED_FORWARD = "feed_forward"
    OTHER = "other"


class TensorRecord(Record):
    """One tensor of a GGUF file.

    ``shape`` is in ggml order (fastest dimension first). ``offset_bytes`` counts from the start of
    file number ``part``. ``layer`` is ``None`` for tensors outside the blocks.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    part: int
    offset_bytes: int
    size_bytes: int
    role: TensorRole
    layer: int | None


class LayerKind(StrEnum):
    """How a layer keeps its past.

    A next-token block predicts further tokens for speculative decoding. llama.cpp counts it as a
    layer for ``-ngl`` and ``--tensor-split``, does not run it unless asked, and gives it no cache;
    build 10068 still loads its weights, newer builds skip them.
    """

    ATTENTION = "attention"
    RECURRENT = "recurrent"
    STATELESS = "stateless"
    NEXT_TOKEN = "next_token"  # noqa: S105 - a multi-token-prediction block, not a credential


class LayerRecord(Record):
    """One block: its weights by role and the state that it keeps per token and per sequence.

    ``key_width`` and ``value_width`` are elements per token in the KV cache (0 where the layer
    keeps none); ``window_tokens`` is the sliding attention window, ``None`` for full attention.
    ``recurrent_state_bytes`` is what one sequence keeps whatever its length (f32 in llama.cpp).
    ``expert_bytes`` is what one expert has in this layer, all its tensors together.
    ``padding_bytes`` is what llama.cpp adds so that each tensor starts at a multiple of 32 bytes.
    """

    index: int
    kind: LayerKind
    role_bytes: dict[TensorRole, int]
    expert_count: int
    expert_bytes: int
    key_width: int
    value_width: int
    window_tokens: int | None
    recurrent_state_bytes: int
    padding_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """All weights of the layer, without padding."""
        return sum(self.role_bytes.values())


class ModelShape(Record):
    """The numbers of the architecture that memory and time estimates need."""

    architecture: str
    layer_count: int
    hidden_size: int
    feed_forward_size: int
    expert_feed_forward_size: int
    expert_count: int
    experts_per_token: int
    vocabulary_size: int
    head_count: int
    context_length: int


class ModelInventory(Record):
    """A model without its bytes: everything that planning and ``inspect`` need.

    ``digest`` is a SHA-256 over the header (tensor names, types, shapes, offsets and the key-value
    pairs), so it identifies a model without reading its weights; ``None`` for a preset.
    ``layers`` has every block of the file, next-token blocks included.

    Weights outside the blocks, by where llama.cpp puts them:

    - ``embedding_bytes``: the input side, on the coordinator's CPU whatever ``-ngl`` says;
    - ``output_bytes``: the output side (head and norm), on the device of the output. It
      includes ``tied_bytes``: a tied embedding, which llama.cpp loads a second time there, but
      shares where the output stays on the coordinator's CPU;
    - ``other_bytes``: small tables (rotary factors) that every device with a layer gets a copy of.

    ``notes`` are sentences on what is unusual, estimates among them.
    """

    name: str
    source: str
    digest: str | None
    file_bytes: int
    part_count: int = 1
    shape: ModelShape
    layers: tuple[LayerRecord, ...]
    embedding_bytes: int
    output_bytes: int
    output_is_tied: bool
    other_bytes: int
    tied_bytes: int = 0
    type_bytes: dict[str, int]
    notes: tuple[str, ...] = ()
    tensors: tuple[TensorRecord, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """All weights of the model, each counted once."""
        return sum(self.type_bytes.values())
