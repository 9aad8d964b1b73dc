"""The tensors of one step in a scratch buffer, and their bytes in GRAPH_COMPUTE. Pure."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from linkcpp.engine.wire_tensor import FLAG_COMPUTE
from linkcpp.worker.chain import PARAMETER_COUNT
from linkcpp.worker.slots import ALIGNMENT_BYTES

# ggml's numbers of the types, which are the same in every build.
F32, I32 = 0, 26
_TENSOR = struct.Struct("<QIQ4I4II16ii10QQQQ64si")
FIRST_ID = 0x1000
_NO_PARAMETERS = (0,) * PARAMETER_COUNT


class Scratch(NamedTuple):
    """A buffer for what comes and goes."""

    buffer: int
    base: int
    size_bytes: int


@dataclass(slots=True)
class StepTensor:
    """A tensor of the graph that is being made."""

    number: int
    type_number: int
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    buffer: int
    data: int
    name: bytes
    op: int = 0
    params: Sequence[int] = _NO_PARAMETERS
    sources: "tuple[StepTensor, ...]" = ()
    view_source: "StepTensor | None" = None
    view_offset: int = 0
    use_count: int = 0

    def pack(self) -> bytes:
        """Write the record."""
        ids = [source.number for source in self.sources]
        return _TENSOR.pack(
            self.number, self.type_number, self.buffer, *self.ne, *self.nb, self.op, *self.params,
            FLAG_COMPUTE if self.op else 0, *ids, *(0,) * (10 - len(ids)),
            self.view_source.number if self.view_source else 0, self.view_offset, self.data,
            self.name, self.use_count,
        )  # fmt: skip


@dataclass(slots=True)
class StepGraph:
    """A graph being made in a scratch buffer, which it fills from the start."""

    scratch: Scratch
    used_bytes: int = 0
    tensors: list[StepTensor] = field(default_factory=list)
    nodes: list[StepTensor] = field(default_factory=list)

    def place(self, size_bytes: int) -> int:
        """Take memory behind all that is taken; return its offset."""
        offset = self.used_bytes
        self.used_bytes += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return offset

    def add(self, tensor: StepTensor) -> StepTensor:
        """Add a tensor, and with an operation a node, behind all others."""
        self.tensors.append(tensor)
        if tensor.op:
            self.nodes.append(tensor)
            for source in tensor.sources:
                source.use_count += 1
        return tensor

    def fresh(
        self,
        ne: tuple[int, int, int],
        name: bytes,
        *,
        type_number: int = F32,
        offset: int | None = None,
    ) -> StepTensor:
        """A dense tensor of four-byte elements, at an offset or else behind all; not yet added."""
        first, second, third = ne
        size_bytes = 4 * first * second * third
        if offset is None:
            offset = self.place(size_bytes)
        return StepTensor(
            number=self.next_number(),
            type_number=type_number,
            ne=(*ne, 1),
            nb=(4, 4 * first, 4 * first * second, size_bytes),
            buffer=self.scratch.buffer,
            data=self.scratch.base + offset,
            name=name,
        )

    def next_number(self) -> int:
        """Return the id of the tensor that is added next."""
        return FIRST_ID + 16 * len(self.tensors)

    def pack(self) -> bytes:
        """Write the payload of GRAPH_COMPUTE."""
        return b"".join(
            (
                struct.pack("<II", 0, len(self.nodes)),
                struct.pack(f"<{len(self.nodes)}Q", *(node.number for node in self.nodes)),
                struct.pack("<I", len(self.tensors)),
                *(tensor.pack() for tensor in self.tensors),
            )
        )
