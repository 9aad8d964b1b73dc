"""The expert function as plain data: a chain of row-wise operations over one expert's weights.

A chain is learned from the graph that llama.cpp itself made (``dispatch.graph``) and replayed on
any subset of (row, expert) pairs. It names operations, since builds number them differently, and
weights without their layer (``ffn_up_exps.weight``), so all layers of a model share one chain.
Every value is f32, one row a pair.
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping
from enum import StrEnum
from typing import Annotated, NamedTuple, Self

from pydantic import Field

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record

MAX_STEPS = 64
MAX_INPUTS = 8
MAX_WIDTH = 1 << 20
PARAMETER_COUNT = 16

UNARY_OPS = frozenset(
    [
        "UNARY", "SCALE", "CLAMP", "SQR", "SQRT", "LOG", "SIN", "COS", "LEAKY_RELU",
        "RMS_NORM", "NORM", "L2_NORM", "CONT",
    ]
)  # fmt: skip
BINARY_OPS = frozenset(("ADD", "SUB", "MUL", "DIV"))

Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Parameter = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


class ChainError(LinkcppError):
    """A chain that cannot be computed row by row, or does not fit the weights, named."""


class SourceKind(StrEnum):
    """Where a step reads from."""

    INPUT = "input"
    STEP = "step"
    WEIGHT = "weight"
    IDS = "ids"


class ChainSource(Record):
    """One source of a step: input or step number ``index``, a weight, or the expert ids."""

    kind: SourceKind
    index: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    weight: Annotated[str, Field(max_length=63)] = ""


class ChainInput(Record):
    """A row that comes from outside: one for each token, or one for each pair."""

    width: Width
    per_pair: bool


class ChainStep(Record):
    """One operation with one row of ``width`` elements a pair as its result.

    ``params`` are ggml's op_params as i32. For UNARY and GLU ``function`` names what the first of
    them numbers (it is then 0 here). ``offset`` is VIEW's, in elements of a row.
    """

    op: Annotated[str, Field(max_length=40)]
    width: Width
    sources: Annotated[tuple[ChainSource, ...], Field(min_length=1, max_length=3)]
    params: Annotated[tuple[Parameter, ...], Field(max_length=PARAMETER_COUNT)] = ()
    function: Annotated[str, Field(max_length=40)] = ""
    offset: Annotated[int, Field(ge=0, le=MAX_WIDTH)] = 0


class Chain(Record):
    """The function of one expert. Only input 0 may be per token; the last step is the result."""

    inputs: Annotated[tuple[ChainInput, ...], Field(min_length=1, max_length=MAX_INPUTS)]
    steps: Annotated[tuple[ChainStep, ...], Field(min_length=1, max_length=MAX_STEPS)]

    @property
    def output_width(self) -> int:
        """Elements of a result row."""
        return self.steps[-1].width

    @property
    def weights(self) -> frozenset[str]:
        """The weights that it reads."""
        return frozenset(
            source.weight
            for step in self.steps
            for source in step.sources
            if source.kind == SourceKind.WEIGHT
        )

    def digest(self) -> str:
        """Identify the chain by its content (SHA-256 in hex)."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class KeyedChain(NamedTuple):
    """A chain with what is asked of it all the time, and a key: equal keys, equal chains."""

    key: Hashable
    chain: Chain
    input_widths: tuple[int, ...]
    is_per_pair: bool
    output_width: int

    @classmethod
    def of(cls, key: Hashable, chain: Chain) -> Self:
        """Take the numbers out of a chain; ``is_per_pair`` is that of input 0."""
        widths = tuple(entry.width for entry in chain.inputs)
        return cls(key, chain, widths, chain.inputs[0].per_pair, chain.output_width)


class WeightShape(NamedTuple):
    """An expert weight: ``width`` in, ``rows`` out (0 for a bias, which is ``width`` wide)."""

    width: int
    rows: int


def check_chain(chain: Chain, weights: Mapping[str, WeightShape]) -> None:
    """Make sure that the chain can be computed, row by row, with these weights.

    A graph made from a checked chain is sound whoever sent the chain.

    Raises:
        ChainError: it cannot, and why.
    """
    if any(not entry.per_pair for entry in chain.inputs[1:]):
        raise ChainError("Only the first input may have one row for each token.")
    for number, step in enumerate(chain.steps):
        rule = _RULES.get(step.op)
        if rule is None:
            raise ChainError(f"Step {number} is {step.op}, which is not row-wise or not known.")
        widths = [_source_width(chain, number, source, weights) for source in step.sources]
        kinds = [source.kind for source in step.sources]
        if complaint := rule(step, kinds, widths, [_shape(s, weights) for s in step.sources]):
            raise ChainError(f"Step {number} ({step.op}) {complaint}.")


def _shape(source: ChainSource, weights: Mapping[str, WeightShape]) -> WeightShape | None:
    return weights.get(source.weight) if source.kind == SourceKind.WEIGHT else None


def _source_width(
    chain: Chain, number: int, source: ChainSource, weights: Mapping[str, WeightShape]
) -> int:
    """Return the row width of a source, 0 for the ids."""
    if source.kind == SourceKind.INPUT:
        if source.index >= len(chain.inputs):
            raise ChainError(f"Step {number} reads input {source.index}, which does not exist.")
        return chain.inputs[source.index].width
    if source.kind == SourceKind.STEP:
        if source.index >= number:
            raise ChainError(f"Step {number} reads step {source.index}, which comes later.")
        return chain.steps[source.index].width
    if source.kind == SourceKind.WEIGHT:
        if source.weight not in weights:
            raise ChainError(f"Step {number} reads {source.weight}, which is not held here.")
        return weights[source.weight].width
    return 0


_ROW = (SourceKind.INPUT, SourceKind.STEP)
_Kinds = list[SourceKind]
_Shapes = list[WeightShape | None]
_Rule = Callable[[ChainStep, _Kinds, list[int], _Shapes], str | None]


def _mul_mat_id(step: ChainStep, kinds: _Kinds, widths: list[int], shapes: _Shapes) -> str | None:
    if len(kinds) != 3 or kinds[0] != SourceKind.WEIGHT or kinds[1] not in _ROW:
        return "does not multiply a weight with rows"
    if kinds[2] != SourceKind.IDS:
        return "does not choose by the expert ids"
    shape = shapes[0]
    if shape is None or not shape.rows:
        return "multiplies with a weight that is not a matrix"
    if widths[1] != shape.width or step.width != shape.rows:
        return f"takes {widths[1]} to {step.width}, but its weight {shape.width} to {shape.rows}"
    return None


def _add_id(step: ChainStep, kinds: _Kinds, widths: list[int], shapes: _Shapes) -> str | None:
    if len(kinds) != 3 or kinds[0] not in _ROW or kinds[1] != SourceKind.WEIGHT:
        return "does not add a weight to rows"
    if kinds[2] != SourceKind.IDS:
        return "does not choose by the expert ids"
    shape = shapes[1]
    if shape is None or shape.rows:
        return "adds a weight that is not a bias"
    return None if step.width == widths[0] == shape.width else "mixes widths"


def _glu(step: ChainStep, kinds: _Kinds, widths: list[int], shapes: _Shapes) -> str | None:
    if len(kinds) > 2 or any(kind not in _ROW for kind in kinds):
        return "reads something other than rows"
    wanted = step.width if len(kinds) == 2 else 2 * step.width
    return None if all(width == wanted for width in widths) else "mixes widths"


def _view(step: ChainStep, kinds: _Kinds, widths: list[int], shapes: _Shapes) -> str | None:
    if len(kinds) != 1 or kinds[0] != SourceKind.STEP:
        return "does not look at a step"
    return None if step.offset + step.width <= widths[0] else "looks past the end of a row"


def _unary(step: ChainStep, kinds: _Kinds, widths: list[int], shapes: _Shapes) -> str | None:
    if len(kinds) != 1 or kinds[0] not in _ROW:
        return "reads something other than one row"
    return None if widths[0] == step.width else "changes the width"


def _binary(step: ChainStep, kinds: _Kinds, widths: list[int], shapes: _Shapes) -> str | None:
    if len(kinds) != 2 or any(kind not in _ROW for kind in kinds):
        return "reads something other than two rows"
    if widths[0] != step.width or widths[1] not in (1, step.width):
        return "mixes widths"
    return None


_RULES: dict[str, _Rule] = {
    "MUL_MAT_ID": _mul_mat_id,
    "ADD_ID": _add_id,
    "GLU": _glu,
    "VIEW": _view,
    **dict.fromkeys(UNARY_OPS, _unary),
    **dict.fromkeys(BINARY_OPS, _binary),
}
