"""GGUF files made byte by byte, so that tests can break any rule of the format."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

U32, F32, STRING, ARRAY, U64 = 4, 6, 8, 9, 10


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def u32(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def text(key: str, value: str) -> bytes:
    return pair(key, STRING, string(value))


def strings(key: str, values: Sequence[str]) -> bytes:
    head = struct.pack("<IQ", STRING, len(values))
    return pair(key, ARRAY, head + b"".join(string(value) for value in values))


@dataclass
class Tensor:
    name: str | bytes
    shape: tuple[int, ...]
    kind: int = 0
    offset: int = 0

    def packed(self) -> bytes:
        return (
            string(self.name)
            + struct.pack("<I", len(self.shape))
            + b"".join(struct.pack("<Q", extent) for extent in self.shape)
            + struct.pack("<IQ", self.kind, self.offset)
        )


def gguf(
    pairs: Sequence[bytes],
    tensors: Sequence[Tensor],
    *,
    data_bytes: int = 0,
    version: int = 3,
    magic: bytes = b"GGUF",
    tensor_count: int | None = None,
    pair_count: int | None = None,
    order: str = "<",
) -> bytes:
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if pair_count is None else pair_count,
    )
    head = magic + struct.pack(f"{order}IQQ", version, *counts)
    head += b"".join(pairs) + b"".join(tensor.packed() for tensor in tensors)
    return head + bytes(-len(head) % 32) + bytes(data_bytes)


def small_model(*, extra_pairs: Sequence[bytes] = ()) -> bytes:
    """A one-layer model that is sound as far as a header can tell (256 bytes of F32 a tensor)."""
    names = ["token_embd.weight", "output_norm.weight", "blk.0.attn_k.weight"]
    tensors = [Tensor(name, (8, 8), offset=256 * index) for index, name in enumerate(names)]
    pairs = [
        text("general.architecture", "llama"),
        u32("llama.block_count", 1),
        u32("llama.embedding_length", 8),
        u32("llama.attention.head_count", 2),
        strings("tokenizer.ggml.tokens", ["a", "bc", ""]),
        *extra_pairs,
    ]
    return gguf(pairs, tensors, data_bytes=256 * 3)
