"""The way from one placement of a layer's experts to another while it serves: stage by stage, each complete.

Pure. Every rank has one buffer more than slots. In a stage it fills that one with an expert, and then lets a slot be
that buffer: what the slot was is free for the next stage. In no stage is an expert held nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from serving.model.expert_balance import ExpertPlacement


@dataclass(frozen=True, slots=True)
class SlotChange:
    """In a stage a slot of a rank becomes that of another expert."""

    rank: int
    slot: int
    expert: int


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """An expert's weights on their way from a buffer of one rank to the spare one of another."""

    expert: int
    source: int  # rank
    source_buffer: int
    rank: int
    buffer: int


Stage = tuple[SlotChange, ...]


def changed(placement: ExpertPlacement, stage: Iterable[SlotChange]) -> ExpertPlacement:
    """The placement after a stage."""
    slots = [list(rank) for rank in placement.slots]
    for change in stage:
        slots[change.rank][change.slot] = change.expert
    return ExpertPlacement(tuple(map(tuple, slots)), placement.experts)


def stages(old: ExpertPlacement, new: ExpertPlacement) -> list[Stage]:
    """Stages that lead from `old` to `new`, but for the order in which a rank has its experts.

    A stage changes at most one slot of a rank, and every placement on the way holds all experts. There are as many
    changes as slots differ; a few more where experts without copies change places in circles.
    """
    slots = [list(rank) for rank in old.slots]
    found: list[Stage] = []
    while pending := _pending(slots, new):
        stage = _safe(slots, pending) or _exchange(slots, pending)
        for change in stage:
            slots[change.rank][change.slot] = change.expert
        found.append(stage)
    return found


def _pending(slots: list[list[int]], new: ExpertPlacement) -> list[SlotChange]:
    """Which slots still have to change: those of experts that a rank has too many of, for those that it lacks."""
    found = []
    for rank, (held, wanted) in enumerate(zip(slots, new.slots, strict=True)):
        surplus, lacking = Counter(held) - Counter(wanted), sorted((Counter(wanted) - Counter(held)).elements())
        for slot, expert in enumerate(held):
            if surplus[expert]:
                surplus[expert] -= 1
                found.append(SlotChange(rank, slot, lacking.pop(0)))
    return found


def _safe(slots: list[list[int]], pending: list[SlotChange]) -> Stage:
    """Changes that take no expert's last copy, one of each rank."""
    copies = Counter(expert for held in slots for expert in held)
    chosen: dict[int, SlotChange] = {}
    for change in pending:
        lost = slots[change.rank][change.slot]
        if change.rank not in chosen and copies[lost] > 1:
            copies[lost] -= 1
            chosen[change.rank] = change
    return tuple(chosen.values())


def _exchange(slots: list[list[int]], pending: list[SlotChange]) -> Stage:
    """Two ranks exchange an expert. Where every pending change takes a last copy, what is wanted is such a copy too."""
    first = pending[0]
    other = next(change for change in pending if slots[change.rank][change.slot] == first.expert)
    return first, SlotChange(other.rank, other.slot, slots[first.rank][first.slot])


class LayerBuffers:
    """Behind which slot of which rank lies which buffer, for one layer: known to every rank, and equal on all."""

    def __init__(self, placement: ExpertPlacement) -> None:
        """Slots have the buffers of their numbers; the one after them is spare."""
        self.placement = placement
        count = len(placement.slots[0])
        self.buffers = [list(range(count)) for _ in placement.slots]
        self.spares = [count for _ in placement.slots]

    def transfers(self, stage: Stage) -> list[WeightTransfer]:
        """What fills the spare buffers of a stage: from the rank itself if it can, else from who gives least yet."""
        given: Counter[int] = Counter()
        found = []
        for change in stage:
            holders = [
                (other != change.rank, given[other], other, slot)
                for other, held in enumerate(self.placement.slots)
                for slot, expert in enumerate(held)
                if expert == change.expert
            ]
            _, _, source, slot = min(holders)
            given[source] += 1
            buffer = self.spares[change.rank]
            found.append(WeightTransfer(change.expert, source, self.buffers[source][slot], change.rank, buffer))
        return found

    def switch(self, stage: Stage) -> None:
        """Slots get the buffers that were filled; those they had are spare."""
        self.placement = changed(self.placement, stage)
        for change in stage:
            own = self.buffers[change.rank]
            own[change.slot], self.spares[change.rank] = self.spares[change.rank], own[change.slot]
