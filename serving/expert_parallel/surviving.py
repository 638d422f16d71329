"""Which ranks hold which experts after ranks have left a group or come to it.

Pure. Experts that are still held stay where they are. Those that are held nowhere take the place of copies, then new
slots; a rank that comes holds what it brings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from serving.model.expert_balance import ExpertPlacement

Placements = tuple[ExpertPlacement, ...]
"""Of the MoE layers, first to last. All have the same number of slots."""
Brought = Sequence[Sequence[int]]
"""For each MoE layer the experts that a new rank holds, slot by slot."""


class ExpertsLost(Exception):
    """Experts are held by no rank, and cannot be: the group computes nothing any more.

    `experts` are those of each MoE layer, counted from the first MoE layer.
    """

    def __init__(self, experts: Mapping[int, Sequence[int]], reason: str) -> None:
        named = "; ".join(f"layer {layer}: {', '.join(map(str, lost))}" for layer, lost in sorted(experts.items()))
        super().__init__(f"experts are lost ({named}): {reason}")
        self.experts = {layer: list(lost) for layer, lost in experts.items()}
        self.reason = reason


def orphans(placements: Placements, ranks: Sequence[int | Brought]) -> dict[int, list[int]]:
    """By MoE layer, the experts that none of `ranks` holds (`regrouped`)."""
    missing = {}
    for layer, placement in enumerate(placements):
        held = {expert for rank in _held(placement, layer, ranks) for expert in rank}
        missing[layer] = sorted(set(range(placement.experts)) - held)
    return {layer: experts for layer, experts in missing.items() if experts}


def regrouped(placements: Placements, ranks: Sequence[int | Brought], slots: int, most_slots: int) -> Placements:
    """The placements of a new group: a number is a rank that stays, with what it held; anything else a rank that comes.

    `slots` is what a rank has where that is enough, `most_slots` what it may have at most. Raises ExpertsLost for
    experts that have no place.
    """
    layers = [_Layer(_held(placement, layer, ranks), placement.experts) for layer, placement in enumerate(placements)]
    for layer in layers:
        layer.host_orphans()
        layer.shrink(slots)
    beyond = {number: list(layer.beyond(most_slots)) for number, layer in enumerate(layers)}
    if any(beyond.values()):
        lost = {layer: experts for layer, experts in beyond.items() if experts}
        raise ExpertsLost(lost, f"{len(ranks)} ranks have room for {most_slots} a layer each")
    needed = max(slots, *(layer.needed for layer in layers))
    return tuple(layer.padded(needed) for layer in layers)


def _held(placement: ExpertPlacement, layer: int, ranks: Sequence[int | Brought]) -> list[list[int]]:
    return [list(placement.slots[rank] if isinstance(rank, int) else rank[layer]) for rank in ranks]


class _Layer:
    """What each rank holds of one layer, while it is changed."""

    def __init__(self, held: list[list[int]], experts: int) -> None:
        self.held = held
        self.experts = experts
        self.copies = Counter(expert for rank in held for expert in rank)
        self.added = [0] * len(held)

    @property
    def needed(self) -> int:
        return max(map(len, self.held))

    def host_orphans(self) -> None:
        """Ranks take them in turn, so that all load at once: over a copy where there is one, else in a new slot."""
        for orphan in range(self.experts):
            if self.copies[orphan]:
                continue
            spare = min(self._spare(), default=None)
            if spare is None:
                rank = min(range(len(self.held)), key=lambda rank: (len(self.held[rank]), self.added[rank], rank))
                self.held[rank].append(orphan)
            else:
                *_, rank, slot = spare
                self.copies[self.held[rank][slot]] -= 1
                self.held[rank][slot] = orphan
            self.copies[orphan] = 1
            self.added[rank] += 1

    def _spare(self) -> Iterator[tuple[int, int, int, int]]:
        """(loads so far, minus copies, rank, slot) of slots whose expert another slot has as well."""
        for rank, held in enumerate(self.held):
            for slot, expert in enumerate(held):
                if self.copies[expert] > 1:
                    yield self.added[rank], -self.copies[expert], rank, slot

    def shrink(self, slots: int) -> None:
        """Give up copies on ranks that have more than so many slots: doubles of the own first, the last first."""
        for held in self.held:
            while len(held) > slots:
                here = Counter(held)
                spare = [slot for slot, expert in enumerate(held) if self.copies[expert] > 1]
                if not spare:
                    break
                given = held.pop(max(spare, key=lambda slot: (here[held[slot]] > 1, slot)))
                self.copies[given] -= 1

    def beyond(self, most_slots: int) -> Iterator[int]:
        """Experts in slots that a rank may not have."""
        return (expert for held in self.held for expert in held[most_slots:])

    def padded(self, slots: int) -> ExpertPlacement:
        """With so many slots a rank; what is over holds again what the rank holds anyway."""
        full = (held + [held[place % len(held)] for place in range(slots - len(held))] for held in self.held)
        return ExpertPlacement(tuple(map(tuple, full)), self.experts)
