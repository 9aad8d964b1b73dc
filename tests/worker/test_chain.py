"""A chain is only accepted where every step is row-wise and fits its weights."""

import pytest

from linkcpp.worker.chain import (
    Chain,
    ChainError,
    ChainInput,
    ChainSource,
    ChainStep,
    SourceKind,
    WeightShape,
    check_chain,
)

WEIGHTS = {
    "ffn_gate_up_exps.weight": WeightShape(64, 96),
    "ffn_down_exps.weight": WeightShape(48, 64),
    "ffn_down_exps.bias": WeightShape(64, 0),
}
IDS = ChainSource(kind=SourceKind.IDS)
ROW = ChainSource(kind=SourceKind.INPUT)


def weight(name: str) -> ChainSource:
    return ChainSource(kind=SourceKind.WEIGHT, weight=name)


def step(number: int) -> ChainSource:
    return ChainSource(kind=SourceKind.STEP, index=number)


FUSED = (
    ChainStep(op="MUL_MAT_ID", width=96, sources=(weight("ffn_gate_up_exps.weight"), ROW, IDS)),
    ChainStep(op="VIEW", width=48, sources=(step(0),)),
    ChainStep(op="VIEW", width=48, sources=(step(0),), offset=48),
    ChainStep(op="GLU", width=48, sources=(step(1), step(2)), function="SWIGLU"),
    ChainStep(op="MUL_MAT_ID", width=64, sources=(weight("ffn_down_exps.weight"), step(3), IDS)),
    ChainStep(op="ADD_ID", width=64, sources=(step(4), weight("ffn_down_exps.bias"), IDS)),
)


def chain(*steps: ChainStep, inputs: tuple[ChainInput, ...] | None = None) -> Chain:
    return Chain(inputs=inputs or (ChainInput(width=64, per_pair=False),), steps=steps)


def test_a_fused_gate_and_up_with_views_and_a_bias_is_accepted() -> None:
    check_chain(chain(*FUSED), WEIGHTS)


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ([FUSED[0].model_copy(update={"op": "SOFT_MAX"})], "not row-wise"),
        ([FUSED[0].model_copy(update={"width": 97})], "64 to 97"),
        ([FUSED[0].model_copy(update={"sources": (ROW, ROW, IDS)})], "does not multiply"),
        ([FUSED[4].model_copy(update={"sources": FUSED[0].sources})], "64 to 64"),
        ([FUSED[0], FUSED[2].model_copy(update={"offset": 49})], "past the end"),
        ([FUSED[0], FUSED[3].model_copy(update={"sources": (step(0), ROW)})], "mixes widths"),
        ([FUSED[1].model_copy(update={"sources": (step(3),)})], "comes later"),
        ([FUSED[0].model_copy(update={"sources": (weight("other"), ROW, IDS)})], "not held"),
    ],
)
def test_a_chain_that_does_not_fit_is_refused_by_name(
    steps: list[ChainStep], complaint: str
) -> None:
    with pytest.raises(ChainError, match=complaint):
        check_chain(chain(*steps), WEIGHTS)


def test_only_the_first_input_may_be_per_token() -> None:
    inputs = (ChainInput(width=64, per_pair=False), ChainInput(width=1, per_pair=False))
    with pytest.raises(ChainError, match="first input"):
        check_chain(chain(*FUSED, inputs=inputs), WEIGHTS)
