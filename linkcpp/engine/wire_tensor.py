"""Tensors and graphs on the ggml-RPC wire, as numpy views: no Python object per tensor."""

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from linkcpp.engine.wire import TENSOR_BYTES, Buffer, WireError

# The last field counts uses in 7.x and is padding in 4.x, where its value does not matter.
TENSOR_DTYPE = np.dtype(
    [
        ("id", "<u8"),
        ("type", "<u4"),
        ("buffer", "<u8"),
        ("ne", "<u4", 4),
        ("nb", "<u4", 4),
        ("op", "<u4"),
        ("op_params", "<i4", 16),
        ("flags", "<i4"),
        ("src", "<u8", 10),
        ("view_src", "<u8"),
        ("view_offs", "<u8"),
        ("data", "<u8"),
        ("name", "S64"),
        ("use_count", "<i4"),
    ]
)
# A graph node is computed only if its flags have this bit (GGML_TENSOR_FLAG_COMPUTE).
FLAG_COMPUTE = 16

Tensors = npt.NDArray[Any]
"""A structured array of ``TENSOR_DTYPE``."""

_GRAPH_HEAD = struct.Struct("<II")
_COUNT = struct.Struct("<I")


def empty_tensors(count: int) -> Tensors:
    """Return ``count`` tensor records that are all zero."""
    return np.zeros(count, TENSOR_DTYPE)


def parse_tensors(data: Buffer) -> Tensors:
    """View ``data`` as tensor records.

    Raises:
        WireError: its length is not a multiple of a record's.
    """
    if len(data) % TENSOR_BYTES:
        raise WireError(f"{len(data)} bytes are not a whole number of {TENSOR_BYTES}-byte tensors.")
    return np.frombuffer(data, TENSOR_DTYPE)


def tensor_names(tensors: Tensors) -> list[bytes]:
    """Return the names, each up to its first NUL."""
    names: list[bytes] = tensors["name"].tolist()
    return [name.partition(b"\0")[0] for name in names]


class Graph(NamedTuple):
    """A GRAPH_COMPUTE payload.

    ``node_ids`` are u64 ids of the nodes in the order of execution; ``tensors`` has their records
    and those of everything that they read, in any order.
    """

    device: int
    node_ids: npt.NDArray[np.uint64]
    tensors: Tensors


def parse_graph(payload: Buffer) -> Graph:
    """View a GRAPH_COMPUTE payload; the arrays share its memory.

    Raises:
        WireError: the counts do not add up to the payload's length.
    """
    total = len(payload)
    if total < _GRAPH_HEAD.size + _COUNT.size:
        raise WireError(f"A graph of {total} bytes has no room for its counts.")
    device, node_count = _GRAPH_HEAD.unpack_from(payload)
    count_at = _GRAPH_HEAD.size + 8 * node_count
    if count_at + _COUNT.size > total:
        raise WireError(f"A graph of {total} bytes cannot list {node_count} nodes.")
    (tensor_count,) = _COUNT.unpack_from(payload, count_at)
    tensors_at = count_at + _COUNT.size
    if tensors_at + TENSOR_BYTES * tensor_count != total:
        raise WireError(
            f"A graph of {total} bytes cannot be {node_count} nodes and {tensor_count} tensors."
        )
    return Graph(
        device,
        np.frombuffer(payload, "<u8", node_count, _GRAPH_HEAD.size),
        np.frombuffer(payload, TENSOR_DTYPE, tensor_count, tensors_at),
    )


def build_graph(graph: Graph) -> bytes:
    """Write a GRAPH_COMPUTE payload."""
    return b"".join(
        (
            _GRAPH_HEAD.pack(graph.device, len(graph.node_ids)),
            np.ascontiguousarray(graph.node_ids, "<u8").tobytes(),
            _COUNT.pack(len(graph.tensors)),
            graph.tensors.tobytes(),
        )
    )
