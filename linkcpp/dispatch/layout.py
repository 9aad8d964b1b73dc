"""Where the elements of a tensor lie. Pure."""

import math
from typing import NamedTuple

from linkcpp.dispatch.memory import tensor_fields
from linkcpp.engine.wire_tensor import Tensors


class Span(NamedTuple):
    """The addresses of a tensor's first byte and of the one after its last."""

    start: int
    end: int

    def overlaps(self, other: "Span") -> bool:
        """Tell whether both have a byte in common."""
        return self.start < other.end and other.start < self.end


def byte_span(tensor: Tensors) -> Span:
    """Return from where to where a tensor of any type reaches.

    Raises:
        RequestError: its type is unknown.
    """
    fields = tensor_fields(tensor.tobytes())
    return Span(fields.data, fields.data + fields.span_bytes)


def lies_row_by_row(tensor: Tensors) -> bool:
    """Tell whether four-byte elements of at most three dimensions have no gaps within a row.

    The rows themselves may be anywhere and in any order, as in a permuted view.
    """
    ne, nb = tensor["ne"].tolist(), tensor["nb"].tolist()
    if ne[3] != 1 or 0 in ne or nb[0] != 4:
        return False
    # An odd step would end a span within an element.
    if any(step % 4 for count, step in zip(ne, nb, strict=True) if count > 1):
        return False
    # Rows over one another would be more to allocate than what is read.
    start, end = byte_span(tensor)
    return bool(4 * math.prod(ne) <= end - start)


def has_no_gaps(tensor: Tensors) -> bool:
    """Tell whether four-byte elements lie one after the other, in the order of the dimensions."""
    step = 4
    for count, found in zip(tensor["ne"].tolist(), tensor["nb"].tolist(), strict=True):
        # With one element the step to the next means nothing.
        if count != 1 and found != step:
            return False
        step *= count
    return True
