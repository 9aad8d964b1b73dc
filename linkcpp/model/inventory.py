"""From headers to a ``ModelInventory``: pure, and the same for files and presets."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.model.architecture import Architecture
from linkcpp.model.checked_header import checked_architecture
from linkcpp.model.header import SkippedArray, TensorInfo, Value
from linkcpp.model.notes import unusual
from linkcpp.model.parts import ModelFiles, is_url, open_model
from linkcpp.model.records import (
    LayerKind,
    LayerRecord,
    ModelInventory,
    ModelShape,
    TensorRecord,
    TensorRole,
)
from linkcpp.model.roles import (
    SIDE_ROLES,
    Side,
    block_role,
    keeps_keys,
    keeps_recurrent_state,
    layer_and_part,
    side,
)
from linkcpp.model.state import LayerState, layer_state

TENSOR_ALIGNMENT_BYTES = 32
MAX_NAME_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What an inventory says of where it is from.

    ``unnamed`` is what to call a model whose header does not; else its source tells.
    """

    source: str
    digest: str | None
    file_bytes: int
    part_count: int = 1
    unnamed: str | None = None


def read_inventory(source: str | Path) -> ModelInventory:
    """Take stock of a model from its headers: a path or an http(s) URL; of a split model any part.

    Reads no weights, and closes what it opened.

    Raises:
        LinkcppError: the model cannot be read, or llama.cpp could not load it; says which and why.
    """
    with open_model(source) as files:
        return inventory_of(files, _lasting_name(files.sources[0].name))


def inventory_of(files: ModelFiles, source: str, *, unnamed: str | None = None) -> ModelInventory:
    """Take stock of an opened model; ``source`` is what leads to it again.

    A model whose header has no name is called ``unnamed``, or as its file. Raises as
    ``build_inventory``.
    """
    identity = ModelIdentity(
        source=source,
        digest=files.digest,
        file_bytes=files.file_bytes,
        part_count=len(files.sources),
        unnamed=unnamed,
    )
    return build_inventory(identity, files.metadata, files.tensors)


def _lasting_name(name: str) -> str:
    """A name that still leads to the model from another working folder."""
    return name if is_url(name) else str(Path(name).absolute())


def build_inventory(
    identity: ModelIdentity,
    metadata: Mapping[str, Value],
    tensors: Iterable[tuple[int, TensorInfo]],
) -> ModelInventory:
    """Count a model's bytes by layer and role, and size what each layer keeps of the past.

    ``tensors`` come with the number of the file that has them.

    Raises:
        LinkcppError: it is not a language model, or has weights that llama.cpp cannot run.
    """
    tensors = tuple(tensors)
    architecture = checked_architecture(identity.source, metadata, tensors)
    records = _tensor_records(identity.source, architecture, tensors)
    layers = _layers(architecture, records)
    outside = [record for record in records if record.layer is None]
    sides: dict[Side, int] = defaultdict(int)
    for record in outside:
        sides[side(record.name, architecture.name)] += record.size_bytes
    embedding = next((r for r in outside if r.name == "token_embd.weight"), None)
    has_head = any(record.name == "output.weight" for record in outside)
    tied_bytes = 0 if embedding is None or has_head else embedding.size_bytes
    types: Counter[str] = Counter()
    for record in records:
        types[record.type_name] += record.size_bytes
    shape = _shape(architecture, layers, embedding)
    return ModelInventory(
        name=_name(identity, metadata),
        source=identity.source,
        digest=identity.digest,
        file_bytes=identity.file_bytes,
        part_count=identity.part_count,
        shape=shape,
        layers=layers,
        embedding_bytes=sides[Side.INPUT],
        output_bytes=sides[Side.OUTPUT] + tied_bytes,
        output_is_tied=tied_bytes > 0,
        tied_bytes=tied_bytes,
        other_bytes=sides[Side.EVERY_DEVICE],
        type_bytes=dict(types.most_common()),
        notes=unusual(architecture, layers, is_tied=tied_bytes > 0),
        tensors=records,
    )


def _tensor_records(
    source: str, architecture: Architecture, tensors: Iterable[tuple[int, TensorInfo]]
) -> tuple[TensorRecord, ...]:
    records = []
    for part, tensor in tensors:
        if tensor.kind.name == "F64":
            raise LinkcppError(
                f"{source} has weights of type F64 ({tensor.name}), which crash llama.cpp.",
                hint="Convert them to F32 or a smaller type, for instance with llama-quantize.",
            )
        layer, rest = layer_and_part(tensor.name)
        role = (
            SIDE_ROLES[side(tensor.name, architecture.name)] if layer is None else block_role(rest)
        )
        records.append(
            TensorRecord(
                name=tensor.name,
                type_name=tensor.kind.name,
                shape=tensor.shape,
                part=part,
                offset_bytes=tensor.offset_bytes,
                size_bytes=tensor.size_bytes,
                role=role,
                layer=layer,
            )
        )
    return tuple(records)


def _layers(
    architecture: Architecture, records: tuple[TensorRecord, ...]
) -> tuple[LayerRecord, ...]:
    by_layer: dict[int, list[TensorRecord]] = defaultdict(list)
    for record in records:
        if record.layer is not None:
            by_layer[record.layer].append(record)
    count = len(by_layer)
    next_token = architecture.number("nextn_predict_layers", 0)
    return tuple(
        _layer(architecture, index, by_layer[index], is_next_token=index >= count - next_token)
        for index in range(count)
    )


def _layer(
    architecture: Architecture, index: int, records: list[TensorRecord], *, is_next_token: bool
) -> LayerRecord:
    parts = [layer_and_part(record.name)[1] for record in records]
    has_recurrence = any(keeps_recurrent_state(part) for part in parts)
    state = LayerState()
    if not is_next_token:
        has_keys = any(keeps_keys(part) for part in parts)
        state = layer_state(architecture, index, has_keys=has_keys, has_recurrence=has_recurrence)
    roles: dict[TensorRole, int] = defaultdict(int)
    for record in records:
        role = record.role
        # Linear attention calls its projections attn_* too, but nothing of it is attention.
        if role is TensorRole.ATTENTION and has_recurrence and not state.key_width:
            role = TensorRole.RECURRENT
        roles[role] += record.size_bytes
    expert_count, expert_bytes = _experts(records)
    return LayerRecord(
        index=index,
        kind=_kind(state, is_next_token=is_next_token),
        role_bytes=dict(roles),
        expert_count=expert_count,
        expert_bytes=expert_bytes,
        key_width=state.key_width,
        value_width=state.value_width,
        window_tokens=state.window_tokens,
        recurrent_state_bytes=state.recurrent_state_bytes,
        padding_bytes=sum(-record.size_bytes % TENSOR_ALIGNMENT_BYTES for record in records),
    )


def _kind(state: LayerState, *, is_next_token: bool) -> LayerKind:
    if is_next_token:
        return LayerKind.NEXT_TOKEN
    if state.key_width:
        return LayerKind.ATTENTION
    return LayerKind.RECURRENT if state.recurrent_state_bytes else LayerKind.STATELESS


def _experts(records: list[TensorRecord]) -> tuple[int, int]:
    """How many experts a block has and the bytes of one; the expert is the outermost dimension."""
    matrices = [
        record for record in records if record.role is TensorRole.EXPERT and len(record.shape) == 3
    ]
    if not matrices:
        return 0, 0
    count = max(record.shape[-1] for record in matrices)
    of_experts = [
        record
        for record in records
        if record.role is TensorRole.EXPERT and record.shape[-1] == count
    ]
    return count, sum(record.size_bytes for record in of_experts) // count


def _shape(
    architecture: Architecture, layers: tuple[LayerRecord, ...], embedding: TensorRecord | None
) -> ModelShape:
    number = architecture.number
    tokens = architecture.metadata.get("tokenizer.ggml.tokens")
    vocabulary = tokens.count if isinstance(tokens, SkippedArray) else number("vocab_size", 0)
    if embedding is not None and len(embedding.shape) == 2:
        vocabulary = embedding.shape[1]
    return ModelShape(
        architecture=architecture.name,
        layer_count=len(layers),
        hidden_size=architecture.positive("embedding_length"),
        feed_forward_size=number("feed_forward_length", 0),
        expert_feed_forward_size=number("expert_feed_forward_length", 0),
        expert_count=max((layer.expert_count for layer in layers), default=0),
        experts_per_token=number("expert_used_count", 0),
        vocabulary_size=vocabulary,
        head_count=number("attention.head_count", 0),
        context_length=number("context_length", 0),
    )


def _name(identity: ModelIdentity, metadata: Mapping[str, Value]) -> str:
    given = metadata.get("general.name")
    name = given if isinstance(given, str) else ""
    name = "".join(letter for letter in name if letter.isprintable()).strip()[:MAX_NAME_CHARACTERS]
    return name or identity.unnamed or identity.source.rpartition("/")[2].removesuffix(".gguf")
