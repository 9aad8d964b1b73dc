"""Slabs on an rpc-server: all of a slice at once, or a bounded cache of a whole model."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from linkcpp.common.errors import LinkcppError
from linkcpp.engine import wire_messages as messages
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.engine.wire import TENSOR_BYTES, Command
from linkcpp.engine.wire_tensor import empty_tensors
from linkcpp.model.expert_tensors import ExpertTensor
from linkcpp.worker.chain import WeightShape
from linkcpp.worker.frames import ErrorCode, FrameError, Numbers
from linkcpp.worker.plan import Weight
from linkcpp.worker.slabs import SlabProvider, experts_by_layer

_PIECE_BYTES = 4 * 2**20
# ggml asks for INIT_TENSOR where a quantized row is not a multiple of this (a backend may pad it).
_PADDED_ROW_ELEMENTS = 512

Progress = Callable[[int], None]


class Group(NamedTuple):
    """Weights that one graph reads together; equal ``key`` means that plans can be shared."""

    key: tuple[object, ...]
    weights: Mapping[str, Weight]
    shapes: Mapping[str, WeightShape]


class SlabStore(Protocol):
    """Says where experts are. ``max_experts`` bounds the distinct experts of one ``locate``."""

    max_experts: int

    def locate(self, layer: int, expert_ids: Numbers) -> tuple[Group, Numbers]:
        """Return the weights and, for each id, its number in their outermost dimension.

        Raises:
            FrameError: a layer or an expert is not held.
        """
        ...

    def locate_few(self, layer: int, expert_ids: Sequence[int]) -> tuple[Group, Sequence[int]]:
        """As ``locate``, for the experts of one token."""
        ...


def allocate(rpc: RpcSocket, tensor: ExpertTensor, count: int) -> Weight:
    """Allocate room for ``count`` experts of a tensor.

    Raises:
        AllocationError: the server has no such memory.
    """
    row_bytes = tensor.kind.row_bytes(tensor.width)
    ne = (tensor.width, tensor.rows, count, 1) if tensor.rows else (tensor.width, count, 1, 1)
    nb = (tensor.kind.block_bytes, row_bytes, row_bytes * ne[1], row_bytes * ne[1] * ne[2])
    name = f"blk.{tensor.layer}.{tensor.part}".encode()
    weight = Weight(name, tensor.kind.number, ne, nb, 0, 0)
    request = messages.GetAllocSize(0, weight_record(weight), bytes(10 * TENSOR_BYTES))
    answer = rpc.call(Command.GET_ALLOC_SIZE, messages.GET_ALLOC_SIZE.build(request))
    buffer, base = rpc.alloc_buffer(messages.NUMBER.parse(answer).value)
    weight = weight._replace(buffer=buffer, data=base)
    if tensor.kind.block_elements > 1 and tensor.width % _PADDED_ROW_ELEMENTS:
        rpc.call(Command.INIT_TENSOR, weight_record(weight))
    return weight


def weight_record(weight: Weight) -> bytes:
    """Write a weight as a tensor record."""
    record = empty_tensors(1)
    record["id"] = weight.data or 1
    record["type"] = weight.type_number
    record["buffer"] = weight.buffer
    record["ne"] = weight.ne
    record["nb"] = weight.nb
    record["data"] = weight.data
    record["name"] = weight.name
    return record.tobytes()


class SlabCopier(NamedTuple):
    """Brings slabs of a provider to an rpc-server."""

    rpc: RpcSocket
    provider: SlabProvider

    def copy(self, tensor: ExpertTensor, expert: int, weight: Weight, slot: int) -> None:
        """Bring one expert's bytes into slot ``slot`` of a weight, in pieces."""
        record = weight_record(weight)
        size = tensor.slab_bytes
        for start in range(0, size, _PIECE_BYTES):
            length = min(_PIECE_BYTES, size - start)
            data = self.provider.read(tensor, expert, start, length)
            self.rpc.set_tensor(record, data, slot * size + start)
            self.rpc.flush()


def shapes_of(tensors: list[ExpertTensor]) -> dict[str, WeightShape]:
    """Return what chains are checked against."""
    return {tensor.part: WeightShape(tensor.width, tensor.rows) for tensor in tensors}


def min_cache_bytes(tensors: Iterable[ExpertTensor]) -> int:
    """Return the memory below which ``CachedSlabs`` has no room for one expert of each kind."""
    kinds = {_signature(layer): layer for layer in _by_layer(tensors).values()}
    return len(kinds) * max(map(_expert_bytes, kinds.values()), default=0)


def _by_layer(tensors: Iterable[ExpertTensor]) -> dict[int, list[ExpertTensor]]:
    layers: dict[int, list[ExpertTensor]] = {}
    for tensor in tensors:
        layers.setdefault(tensor.layer, []).append(tensor)
    return layers


def _signature(tensors: list[ExpertTensor]) -> tuple[object, ...]:
    return tuple((t.part, t.kind.number, t.width, t.rows) for t in tensors)


def _expert_bytes(tensors: list[ExpertTensor]) -> int:
    return sum(tensor.slab_bytes for tensor in tensors)


class LoadedSlabs:
    """All experts of a provider's segments, loaded once; a weight tensor for each layer and part.

    Raises:
        AllocationError: the server has too little memory.
        LinkcppError: the slabs cannot be read.
    """

    def __init__(
        self, rpc: RpcSocket, provider: SlabProvider, on_progress: Progress | None = None
    ) -> None:
        self._groups: dict[int, Group] = {}
        self._numbers: dict[int, npt.NDArray[np.int32]] = {}
        self._few: dict[int, list[int]] = {}
        self.weight_bytes = 0
        self.max_experts = 1 << 30
        copier = SlabCopier(rpc, provider)
        for layer, experts in experts_by_layer(provider.segments).items():
            tensors = [tensor for tensor in provider.tensors if tensor.layer == layer]
            weights = {}
            for tensor in tensors:
                weight = weights[tensor.part] = allocate(rpc, tensor, len(experts))
                for slot, expert in enumerate(experts):
                    copier.copy(tensor, expert, weight, slot)
                    self.weight_bytes += tensor.slab_bytes
                    if on_progress is not None:
                        on_progress(tensor.slab_bytes)
            self._groups[layer] = Group((layer,), weights, shapes_of(tensors))
            numbers = np.full(tensors[0].expert_count, -1, np.int32)
            numbers[experts] = np.arange(len(experts), dtype=np.int32)
            self._numbers[layer] = numbers
            self._few[layer] = numbers.tolist()

    def locate(self, layer: int, expert_ids: Numbers) -> tuple[Group, Numbers]:
        """Where these experts are; see ``SlabStore.locate``."""
        group = self._groups.get(layer)
        if group is None:
            raise FrameError(ErrorCode.UNKNOWN_LAYER, f"Layer {layer} is not held here.")
        numbers = self._numbers[layer]
        # As unsigned numbers negative ones are beyond the end.
        try:
            local = numbers[expert_ids.view(np.uint32)]
        except IndexError:
            raise FrameError(
                ErrorCode.UNKNOWN_EXPERT, f"Layer {layer} has experts 0 to {len(numbers) - 1}."
            ) from None
        if local.min() < 0:
            missing = int(expert_ids[local < 0][0])
            raise FrameError(
                ErrorCode.UNKNOWN_EXPERT, f"Expert {missing} of layer {layer} is not held here."
            )
        return group, local

    def locate_few(self, layer: int, expert_ids: Sequence[int]) -> tuple[Group, Sequence[int]]:
        """Where these experts are; see ``SlabStore.locate_few``."""
        numbers = self._few.get(layer, ())
        if min(expert_ids) >= 0 and max(expert_ids) < len(numbers):
            local = [numbers[expert] for expert in expert_ids]
            if min(local) >= 0:
                return self._groups[layer], local
        group, found = self.locate(layer, np.array(expert_ids, np.int32))
        return group, found.tolist()


@dataclass(slots=True)
class _Arena:
    """Slots for experts of all layers whose tensors have the same types and shapes."""

    group: Group
    free: list[int]
    slots: "OrderedDict[tuple[int, int], int]"


class CachedSlabs:
    """Experts of a whole model, brought when they are needed; the least recently used leave.

    ``memory_bytes`` bounds all slots together; room is given to the first kinds of layers that
    ask for it. At least one expert of each kind of layer must fit.

    Raises:
        LinkcppError: ``memory_bytes`` does not suffice.
    """

    def __init__(self, rpc: RpcSocket, provider: SlabProvider, memory_bytes: int) -> None:
        self._rpc = rpc
        self._copier = SlabCopier(rpc, provider)
        self._layers = _by_layer(provider.tensors)
        kinds = {_signature(tensors): tensors for tensors in self._layers.values()}
        self._arenas: dict[tuple[object, ...], _Arena] = {}
        share = memory_bytes // len(kinds)
        self.max_experts = 1 << 30
        self._slot_counts: dict[tuple[object, ...], int] = {}
        for signature, tensors in kinds.items():
            expert_bytes = _expert_bytes(tensors)
            total = sum(t[0].expert_count for t in self._layers.values())
            slots = min(share // expert_bytes, total)
            if slots < 1:
                raise LinkcppError(
                    f"The fallback needs at least {expert_bytes * len(kinds)} "
                    f"bytes for its experts, not {memory_bytes}.",
                    hint="Give it more memory.",
                )
            self._slot_counts[signature] = slots
            self.max_experts = min(self.max_experts, slots)
        self.loaded_count = 0

    def locate(self, layer: int, expert_ids: Numbers) -> tuple[Group, Numbers]:
        """Bring what is missing and tell where it is; see ``SlabStore.locate``."""
        tensors = self._layers.get(layer)
        if tensors is None:
            raise FrameError(ErrorCode.UNKNOWN_LAYER, f"Layer {layer} has no experts.")
        experts: list[int] = np.unique(expert_ids).tolist()
        if experts[0] < 0 or experts[-1] >= tensors[0].expert_count:
            raise FrameError(
                ErrorCode.UNKNOWN_EXPERT,
                f"Layer {layer} has experts 0 to {tensors[0].expert_count - 1}.",
            )
        arena = self._arena(tensors)
        for expert in experts:
            if (layer, expert) in arena.slots:
                arena.slots.move_to_end((layer, expert))
        for expert in experts:
            if (layer, expert) not in arena.slots:
                self._bring(arena, tensors, layer, expert)
        slots = np.zeros(experts[-1] + 1, np.int32)
        for expert in experts:
            slots[expert] = arena.slots[layer, expert]
        return arena.group, slots[expert_ids]

    def locate_few(self, layer: int, expert_ids: Sequence[int]) -> tuple[Group, Sequence[int]]:
        """Bring what is missing; see ``SlabStore.locate_few``."""
        group, found = self.locate(layer, np.array(expert_ids, np.int32))
        return group, found.tolist()

    def _arena(self, tensors: list[ExpertTensor]) -> _Arena:
        signature = _signature(tensors)
        if signature not in self._arenas:
            count = self._slot_counts[signature]
            weights = {tensor.part: allocate(self._rpc, tensor, count) for tensor in tensors}
            group = Group(("arena", *signature), weights, shapes_of(tensors))
            self._arenas[signature] = _Arena(group, list(range(count)), OrderedDict())
        return self._arenas[signature]

    def _bring(self, arena: _Arena, tensors: list[ExpertTensor], layer: int, expert: int) -> None:
        slot = arena.free.pop() if arena.free else arena.slots.popitem(last=False)[1]
        try:
            for tensor in tensors:
                weight = arena.group.weights[tensor.part]
                self._copier.copy(tensor, expert, weight, slot)
        except BaseException:
            arena.free.append(slot)
            raise
        arena.slots[layer, expert] = slot
        self.loaded_count += 1
