"""What a window of slots takes and how long it takes: bytes exact, time by the memory it reads.

A *slot* is what llama.cpp counts for ``-ngl``: every block of the file (next-token blocks too), and
the output after them. A window is ``[first, last)`` in slots.

Decoding one token streams the active weights and the past of every layer once from memory, and that
bounds its speed. Of the experts only those that the router chooses are read; of the KV cache half
of the context, the mean over a conversation that fills it.

Hidden states go through the coordinator, whatever the neighbours of a stage are: with a link made
20 ms slower both builds took one round trip longer for each token and stage, no more.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from linkcpp.engine.records import EngineFingerprint
from linkcpp.model.memory import (
    coordinator_weight_bytes,
    kv_bytes,
    kv_token_bytes,
    layer_weight_bytes,
    recurrent_bytes,
    window_weight_bytes,
)
from linkcpp.model.records import LayerKind, LayerRecord, ModelInventory, TensorRole
from linkcpp.planning.buffers import BufferSizes, buffer_sizes
from linkcpp.planning.problem import Floats, Integers
from linkcpp.planning.records import DeviceMemory, PlanOptions

# What a deployment's programs take of the coordinator's RAM besides the model: supervisor 84 MB,
# front 56 MB, llama-server 35 MB, and 5 MB for the keeper of each, with pages that they share
# counted once. The rest is for what grows with requests.
HOST_PROGRAM_BYTES = 224 * 2**20

_F32_BYTES = 4
# What a visit carries beside hidden states or logits: positions, indices, mask, headers (3 to 6 KB
# a token counted on the wire, on both builds).
_MESSAGE_BYTES = 6144


def loads_next_token_blocks(engine: EngineFingerprint | None) -> bool:
    """Whether a build loads next-token blocks that it does not run.

    Build 10068 (RPC 4.0.3) does, the builds with RPC 7 do not; the RPC version stands for the
    build, since many packages do not tell their build number.
    """
    return engine is None or engine.rpc_version is None or engine.rpc_version.major < 7


def pipelines_remote_devices(engine: EngineFingerprint | None) -> bool:
    """Whether a build processes prompts as a pipeline over RPC devices (see ``buffers``).

    That takes more memory, so it is assumed of a build that is not known.
    """
    return engine is None or engine.rpc_version is None or engine.rpc_version.major >= 7


@dataclass(frozen=True)
class Windows:
    """Every window of a model in flat arrays, ordered by first slot, then last.

    ``device_bytes`` is all that a window takes on a device that is not the coordinator's CPU,
    ``read_bytes`` what one token reads there, ``link_bytes`` what it carries over a link.
    """

    first: Integers
    last: Integers
    device_bytes: Integers
    read_bytes: Floats
    link_bytes: Floats


@dataclass(frozen=True)
class Costs:
    """A model with the options of a plan: sizes and reads of any window.

    Tables are made once and kept: the search for remedies asks for them again and again.
    """

    inventory: ModelInventory
    options: PlanOptions
    loads_next_token: bool
    buffers: BufferSizes = field(init=False)
    _windows: dict[bool, Windows] = field(default_factory=dict, init=False, compare=False)
    _host_bytes: dict[bool, Integers] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", buffer_sizes(self.inventory, self.options))

    @property
    def layer_count(self) -> int:
        """Blocks of the file, next-token blocks included."""
        return len(self.inventory.layers)

    @property
    def slots(self) -> int:
        """The blocks and the output."""
        return self.layer_count + 1

    def layers(self, first: int, last: int) -> tuple[LayerRecord, ...]:
        """The layers of a window, without the output."""
        return self.inventory.layers[first : min(last, self.layer_count)]

    def holds_output(self, last: int) -> bool:
        """Whether a window that ends before slot ``last`` has the output."""
        return last == self.slots

    def layer_kv_bytes(self, layer: LayerRecord) -> int:
        """KV cache of a layer for all sequences."""
        options = self.options
        return kv_bytes(
            layer,
            context_tokens=options.context_tokens,
            parallel=options.parallel,
            cache_type_k=options.cache_type_k,
            cache_type_v=options.cache_type_v,
            ubatch_tokens=min(options.ubatch_tokens, options.batch_tokens),
        )

    def kept_expert_bytes(self, layer: LayerRecord) -> int:
        """What a layer leaves to the coordinator's RAM if its experts stay there."""
        loaded = layer_weight_bytes(layer, loads_next_token=self.loads_next_token)
        return min(loaded, layer.role_bytes.get(TensorRole.EXPERT, 0))

    def read_expert_bytes(self, layer: LayerRecord) -> float:
        """What one token reads of a layer's experts."""
        if layer.kind is LayerKind.NEXT_TOKEN or not layer.expert_count:
            return 0.0
        share = min(1.0, self.inventory.shape.experts_per_token / layer.expert_count)
        return layer.role_bytes.get(TensorRole.EXPERT, 0) * share

    def read_layer_bytes(self, layer: LayerRecord) -> float:
        """What one token reads of a layer: active weights and half of the context's cache."""
        if layer.kind is LayerKind.NEXT_TOKEN:
            return 0.0
        experts = layer.role_bytes.get(TensorRole.EXPERT, 0)
        weights = layer.weight_bytes - experts + self.read_expert_bytes(layer)
        past = self.options.context_tokens / 2
        if layer.window_tokens is not None:
            past = min(past, layer.window_tokens)
        options = self.options
        per_token = kv_token_bytes(
            layer, cache_type_k=options.cache_type_k, cache_type_v=options.cache_type_v
        )
        return weights + past * per_token + recurrent_bytes(layer)

    def read_window_bytes(self, first: int, last: int) -> float:
        """What one token reads in a window."""
        total = sum(self.read_layer_bytes(layer) for layer in self.layers(first, last))
        return total + (self.inventory.output_bytes if self.holds_output(last) else 0)

    def link_bytes(self, last: int) -> float:
        """What a visit of a window carries over a link: hidden state there, and back or logits."""
        shape = self.inventory.shape
        back = shape.vocabulary_size if self.holds_output(last) else shape.hidden_size
        return float((shape.hidden_size + back) * _F32_BYTES + _MESSAGE_BYTES)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """RAM for snapshots of what cannot be rewound: recurrent states and sliding windows."""
        one = 0
        for layer in self.inventory.layers:
            one += recurrent_bytes(layer)
            if layer.window_tokens is not None:
                one += self.layer_kv_bytes(layer) // self.options.parallel
        return one * self.options.checkpoint_count * self.options.parallel

    def device_memory(
        self, first: int, last: int, *, is_pipeline: bool, available: int, reserve: int
    ) -> DeviceMemory:
        """What a window takes on a device that is not the coordinator's CPU."""
        layers = self.layers(first, last)
        output = self.holds_output(last)
        return DeviceMemory(
            weight_bytes=window_weight_bytes(
                self.inventory,
                layers,
                holds_output=output,
                loads_next_token=self.loads_next_token,
            ),
            kv_bytes=sum(self.layer_kv_bytes(layer) for layer in layers),
            recurrent_bytes=sum(
                recurrent_bytes(layer, parallel=self.options.parallel) for layer in layers
            ),
            compute_bytes=self.buffers.device(
                first, first + len(layers), holds_output=output, is_pipeline=is_pipeline
            ),
            reserve_bytes=reserve,
            available_bytes=available,
        )

    def host_memory(
        self, last: int, *, is_pipeline: bool, available: int, reserve: int, kept: int = 0
    ) -> DeviceMemory:
        """What the coordinator's RAM holds: inputs, slots 0 to ``last - 1``, ``kept`` experts."""
        layers = self.layers(0, last)
        output = self.holds_output(last)
        weights = coordinator_weight_bytes(
            self.inventory, layers, holds_output=output, loads_next_token=self.loads_next_token
        )
        compute = self.buffers.host(len(layers), holds_output=output, is_pipeline=is_pipeline)
        if kept and not layers:
            compute += max(self.buffers.layer_bytes)
        states = sum(recurrent_bytes(layer, parallel=self.options.parallel) for layer in layers)
        return DeviceMemory(
            weight_bytes=weights + kept,
            kv_bytes=sum(self.layer_kv_bytes(layer) for layer in layers),
            recurrent_bytes=states,
            compute_bytes=compute,
            checkpoint_bytes=self.checkpoint_bytes,
            program_bytes=HOST_PROGRAM_BYTES,
            reserve_bytes=reserve,
            available_bytes=available,
        )

    def host_bytes(self, *, is_pipeline: bool) -> Integers:
        """What the coordinator's RAM holds with slots 0 to ``n - 1``, for every ``n``."""
        if is_pipeline not in self._host_bytes:
            sizes = [
                self.host_memory(n, is_pipeline=is_pipeline, available=0, reserve=0).used_bytes
                for n in range(self.slots + 1)
            ]
            self._host_bytes[is_pipeline] = np.array(sizes, dtype=np.int64)
        return self._host_bytes[is_pipeline]

    def windows(self, *, is_pipeline: bool) -> Windows:
        """Every window of the model."""
        if is_pipeline not in self._windows:
            self._windows[is_pipeline] = self._tabulate(is_pipeline=is_pipeline)
        return self._windows[is_pipeline]

    def _tabulate(self, *, is_pipeline: bool) -> Windows:
        """Sum layers by prefix sums; the rest is worked out window by window."""
        slots, count = self.slots, self.layer_count
        layers = self.inventory.layers
        fixed = _prefix([self._layer_bytes(layer) for layer in layers])
        read = _prefix([self.read_layer_bytes(layer) for layer in layers])
        first, last = np.triu_indices(slots + 1, k=1)
        end = np.minimum(last, count)
        output = last == slots
        compute = [
            self.buffers.device(i, min(j, count), holds_output=j == slots, is_pipeline=is_pipeline)
            for i, j in zip(first.tolist(), last.tolist(), strict=True)
        ]
        has_layers = end > first
        device = (
            (fixed[end] - fixed[np.minimum(first, count)]).astype(np.int64)
            + np.where(has_layers, self.inventory.other_bytes, 0)
            + np.where(output, self.inventory.output_bytes, 0)
            + np.array(compute, dtype=np.int64)
        )
        reads = (
            read[end]
            - read[np.minimum(first, count)]
            + np.where(output, float(self.inventory.output_bytes), 0.0)
        )
        link = np.where(output, self.link_bytes(slots), self.link_bytes(0))
        return Windows(first, last, device, reads, link)

    def _layer_bytes(self, layer: LayerRecord) -> int:
        weights = layer_weight_bytes(layer, loads_next_token=self.loads_next_token)
        states = recurrent_bytes(layer, parallel=self.options.parallel)
        return weights + self.layer_kv_bytes(layer) + states


def _prefix(values: list[int] | list[float]) -> npt.NDArray[Any]:
    return np.concatenate([[0], np.cumsum(values)])
