"""The way between two placements: every stage complete, one slot a rank, and weights read where they lie."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.expert_parallel.stages import LayerBuffers, changed, stages
from serving.model.expert_balance import ExpertPlacement, Layout, placed


@st.composite
def two_placements(draw: st.DrawFn) -> tuple[ExpertPlacement, ExpertPlacement]:
    """Of the same experts on the same ranks; without spare slots, experts change places in circles."""
    ranks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    spare = draw(st.integers(0, ranks * slots - 1))
    experts = ranks * slots - spare
    chance = draw(st.randoms(use_true_random=False))

    def shuffled() -> ExpertPlacement:
        held = [*range(experts), *(chance.randrange(experts) for _ in range(spare))]
        chance.shuffle(held)
        return ExpertPlacement(tuple(tuple(held[rank * slots : (rank + 1) * slots]) for rank in range(ranks)), experts)

    return shuffled(), shuffled()


@settings(max_examples=150)
@given(two_placements())
def test_every_stage_holds_all_experts_and_changes_one_slot_a_rank(
    both: tuple[ExpertPlacement, ExpertPlacement],
) -> None:
    old, new = both
    now, made = old, 0
    for stage in stages(old, new):
        assert len({change.rank for change in stage}) == len(stage) > 0
        now = changed(now, stage)  # raises where an expert is held nowhere
        made += len(stage)
    assert [Counter(rank) for rank in now.slots] == [Counter(rank) for rank in new.slots]
    assert new.moves_from(old) <= made <= 2 * new.moves_from(old)


@settings(max_examples=100)
@given(two_placements())
def test_buffers_hold_what_slots_are_said_to(both: tuple[ExpertPlacement, ExpertPlacement]) -> None:
    """Weights are played by the numbers of experts: they go where transfers say, and are read from slots' buffers."""
    old, new = both
    layer = LayerBuffers(old)
    memory = [[*rank, None] for rank in old.slots]
    for stage in stages(old, new):
        transfers = layer.transfers(stage)
        serving = [{own[slot] for slot in range(len(own))} for own in layer.buffers]
        for transfer in transfers:
            assert transfer.buffer not in serving[transfer.rank], "a buffer in use is written to"
            assert transfer.source_buffer in serving[transfer.source], "a buffer is read that may be written to"
        for transfer in transfers:
            memory[transfer.rank][transfer.buffer] = memory[transfer.source][transfer.source_buffer]
        layer.switch(stage)
        for own, buffers, held in zip(memory, layer.buffers, layer.placement.slots, strict=True):
            assert tuple(own[number] for number in buffers) == held


def test_a_rank_is_asked_for_no_more_than_others() -> None:
    old = ExpertPlacement(((0, 1), (0, 2), (3, 1), (4, 2)), experts=5)
    new = ExpertPlacement(((0, 1), (0, 2), (3, 0), (4, 0)), experts=5)
    (stage,) = stages(old, new)
    assert sorted(transfer.source for transfer in LayerBuffers(old).transfers(stage)) == [0, 1]


def test_a_drift_is_followed_by_few_stages() -> None:
    loads = [1 / (expert + 1) for expert in range(256)]
    random.Random(1).shuffle(loads)
    layout = Layout(ranks=32, slots=10)
    old = placed(loads, layout)
    new = placed([load * random.Random(2).lognormvariate(0, 0.2) for load in loads], layout)
    assert len(stages(old, new)) <= 3 * layout.slots
