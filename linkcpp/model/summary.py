"""Totals of an inventory that people ask for: pure."""

import math
from collections import defaultdict

from linkcpp.common.records import Record
from linkcpp.model.records import ModelInventory, TensorRole


class Summary(Record):
    """A model in a few numbers. ``role_bytes`` is in falling order, each weight counted once."""

    parameter_count: int
    role_bytes: dict[TensorRole, int]
    expert_count: int
    expert_share: float
    smallest_expert_bytes: int
    largest_expert_bytes: int


def summarize(inventory: ModelInventory) -> Summary:
    """Add up layers and what is outside them."""
    roles: dict[TensorRole, int] = defaultdict(int)
    for layer in inventory.layers:
        for role, size in layer.role_bytes.items():
            roles[role] += size
    roles[TensorRole.EMBEDDING] += inventory.embedding_bytes
    roles[TensorRole.OUTPUT] += inventory.output_bytes - inventory.tied_bytes
    roles[TensorRole.OTHER] += inventory.other_bytes
    sizes = [layer.expert_bytes for layer in inventory.layers if layer.expert_count]
    return Summary(
        parameter_count=sum(math.prod(tensor.shape) for tensor in inventory.tensors),
        role_bytes={
            role: size for role, size in sorted(roles.items(), key=lambda item: -item[1]) if size
        },
        expert_count=sum(layer.expert_count for layer in inventory.layers),
        expert_share=roles[TensorRole.EXPERT] / max(inventory.weight_bytes, 1),
        smallest_expert_bytes=min(sizes, default=0),
        largest_expert_bytes=max(sizes, default=0),
    )
