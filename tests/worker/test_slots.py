"""Values of a chain share memory only where no later step needs the earlier one."""

import random

import pytest

from linkcpp.worker.chain import Chain, ChainInput, ChainSource, ChainStep, SourceKind
from linkcpp.worker.slots import assign_slots, scratch_need

IDS, ROW = ChainSource(kind=SourceKind.IDS), ChainSource(kind=SourceKind.INPUT)


def weight(part: str) -> ChainSource:
    return ChainSource(kind=SourceKind.WEIGHT, weight=f"ffn_{part}_exps.weight")


def of_step(number: int) -> ChainSource:
    return ChainSource(kind=SourceKind.STEP, index=number)


def multiplied(part: str, row: ChainSource, width: int) -> ChainStep:
    return ChainStep(op="MUL_MAT_ID", width=width, sources=(weight(part), row, IDS))


SWIGLU = Chain(
    inputs=(ChainInput(width=3072, per_pair=False),),
    steps=(
        multiplied("gate", ROW, 1024),
        multiplied("up", ROW, 1024),
        ChainStep(op="GLU", width=1024, sources=(of_step(0), of_step(1)), function="SWIGLU"),
        multiplied("down", of_step(2), 3072),
    ),
)


def test_the_result_of_a_large_expert_takes_the_place_of_its_gathered_rows() -> None:
    slots = assign_slots(SWIGLU, gathers_rows=True)
    assert slots.widths == (3072, 1024, 1024, 1024)
    assert slots.of_step == (1, 2, 3, 0)


def test_64_mib_take_half_of_a_large_batch_of_the_largest_model() -> None:
    need = scratch_need(SWIGLU)
    assert need.max_pairs(512, 64 * 2**20) > 8 * 512 / 2
    assert need.total_bytes(512, need.max_pairs(512, 64 * 2**20)) <= 64 * 2**20


def random_chain(seed: int) -> Chain:
    dice = random.Random(seed)  # noqa: S311
    steps: list[ChainStep] = []
    for number in range(dice.randint(1, 12)):
        values = [ROW, *(of_step(k) for k in range(number))]
        width = dice.choice([8, 16, 24, 64])
        if number and dice.random() < 0.25:
            steps.append(ChainStep(op="VIEW", width=8, sources=(of_step(dice.randrange(number)),)))
        else:
            chosen = tuple(dice.choice(values) for _ in range(dice.randint(1, 2)))
            steps.append(ChainStep(op="ADD", width=width, sources=chosen))
    return Chain(inputs=(ChainInput(width=32, per_pair=False),), steps=tuple(steps))


@pytest.mark.parametrize("gathers_rows", [True, False])
def test_no_value_is_overwritten_before_its_last_reader(gathers_rows: bool) -> None:
    for seed in range(300):
        chain = random_chain(seed)
        slots = assign_slots(chain, gathers_rows=gathers_rows)
        # Play the steps: a slot has the value of the step that wrote it last.
        content: dict[int, str] = {0: "rows"} if gathers_rows else {}
        values: list[tuple[int, str]] = []
        for number, step in enumerate(chain.steps):
            slot = slots.of_step[number]
            for source in step.sources:
                place: int | None
                if source.kind == SourceKind.STEP:
                    place, value = values[source.index]
                else:
                    place, value = (0, "rows") if gathers_rows else (None, "rows")
                assert place is None or content[place] == value
                assert step.op == "VIEW" or place is None or place != slot
            if step.op == "VIEW":
                values.append(values[step.sources[0].index])
                assert slot == values[-1][0]
                continue
            assert slots.widths[slot] >= step.width
            content[slot] = f"step {number}"
            values.append((slot, content[slot]))
