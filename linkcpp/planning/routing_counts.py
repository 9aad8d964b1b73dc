"""How often each expert was chosen, as recorded while a model served: ``--hot FILE``.

``docs/expert-plans.md`` describes the format.
"""

import json
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import WireRecord

Index = Annotated[int, Field(ge=0, lt=2**20)]
Count = Annotated[int, Field(ge=0, lt=2**62)]
_MAX_LAYERS = 10_000


class RoutingCounts(WireRecord):
    """``layers[layer][expert]`` is how many (token, expert) pairs were computed; 0 if not named.

    ``model_digest`` is that of the model's inventory, ``None`` where it is not known.
    """

    schema_version: Literal[1] = 1
    model_digest: str | None = None
    layers: dict[Index, dict[Index, Count]] = Field(max_length=_MAX_LAYERS)

    def weights(self, layer: int, expert_count: int) -> list[float]:
        """Shares of the layer's work by expert.

        Every expert counts one more than was recorded, as none is never chosen (Laplace).
        """
        recorded = self.layers.get(layer, {})
        counts = [1 + recorded.get(expert, 0) for expert in range(expert_count)]
        total = sum(counts)
        return [count / total for count in counts]


def parse_counts(text: bytes | str, *, source: str) -> RoutingCounts:
    """Read recorded counts; ``source`` names them in errors.

    Raises:
        LinkcppError: they are not counts.
    """
    hint = "Record them with a running deployment; docs/expert-plans.md shows the format."
    try:
        return RoutingCounts.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "content"
        raise LinkcppError(
            f"{source} has no routing counts: {where}: {first['msg']}.", hint=hint
        ) from error
    except (ValueError, RecursionError) as error:
        raise LinkcppError(f"{source} has no routing counts: it is not JSON.", hint=hint) from error
