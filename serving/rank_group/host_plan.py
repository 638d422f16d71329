"""Which experts a group's members hold where a member may be a whole host, and which of its ranks holds which. Pure.

A row that needs experts of a host goes there once, as to one rank with many slots, and there on to the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.expert_parallel.surviving import Brought, Placements
from serving.model.expert_balance import ExpertPlacement

BRIDGE = 0  # of a host's ranks the one that brings rows from elsewhere, and to which all other experts are elsewhere


@dataclass(frozen=True, order=True, slots=True)
class HostPlace:
    """Ranks [start, start + ranks) of a group, which are on a host of their own."""

    start: int
    ranks: int

    @property
    def end(self) -> int:
        return self.start + self.ranks

    def __str__(self) -> str:
        return f"rank {self.start}" if self.ranks == 1 else f"ranks {self.start} to {self.end - 1}"


def refusal(place: HostPlace, taken: Sequence[HostPlace], local: int, ranks: int) -> str | None:
    """Why a host cannot have this place in a group of `ranks`, of which the leader's host has the first `local`."""
    if place.ranks < 1 or not local <= place.start < place.end <= ranks:
        return f"{place} cannot be a host's: ranks {local} to {ranks - 1} are those of other hosts than the leader's"
    other = next((one for one in taken if one.start < place.end and place.start < one.end), None)
    return None if other is None else f"{place} cannot be this host's: another one has {other}"


def unplaced(taken: Sequence[HostPlace], local: int, ranks: int) -> list[int]:
    """The ranks that no host has."""
    found = {rank for place in taken for rank in range(place.start, place.end)}
    return [rank for rank in range(local, ranks) if rank not in found]


def of_members(of_ranks: Placements, local: int, places: Sequence[HostPlace]) -> Placements:
    """Of placements on all ranks those on the members of a group: its `local` ranks, and each host as one."""
    spans = [*((rank, rank + 1) for rank in range(local)), *((place.start, place.end) for place in sorted(places))]
    found = []
    for placement in of_ranks:
        held = [tuple(dict.fromkeys(e for rank in placement.slots[begin:end] for e in rank)) for begin, end in spans]
        found.append((held, placement.experts))
    slots = max(len(one) for held, _ in found for one in held)
    return tuple(ExpertPlacement(tuple(_filled(one, slots) for one in held), experts) for held, experts in found)


def of_ranks_of(of_ranks: Placements, place: HostPlace) -> list[Brought]:
    """What each rank of a host holds of each layer."""
    return [[placement.slots[rank] for placement in of_ranks] for rank in range(place.start, place.end)]


@dataclass(frozen=True, slots=True)
class HostPlan:
    """How a host's ranks hold what it is to hold.

    `placements` are those of each MoE layer over the bridge and the host's ranks; `physical[layer][slot]` is where rows
    for a slot of the host go: rank * slots + slot of these.
    """

    placements: Placements
    physical: tuple[tuple[int, ...], ...]


def host_plan(held: Brought, experts: int, before: Sequence[Brought]) -> HostPlan:
    """Of `held`, slot by slot of each MoE layer of `experts`, each on one rank: on one that has it `before`, if any.

    What no rank has goes to the one with least so far, so that all load at once.
    """
    layers = [_shared(slots, [rank[layer] for rank in before]) for layer, slots in enumerate(held)]
    elsewhere = [_elsewhere(slots, experts) for slots in held]
    most = max(len(one) for ranks, away in zip(layers, elsewhere, strict=True) for one in (*ranks, away))
    placements, physical = [], []
    for ranks, away, slots in zip(layers, elsewhere, held, strict=True):
        placements.append(ExpertPlacement(tuple(_filled(one, most) for one in (away, *ranks)), experts))
        at: dict[int, int] = {}
        for rank, own in enumerate(ranks, 1):
            for slot, expert in enumerate(own):
                at.setdefault(expert, rank * most + slot)
        physical.append(tuple(at[e] for e in slots))
    return HostPlan(tuple(placements), tuple(physical))


def _elsewhere(slots: Sequence[int], experts: int) -> list[int]:
    """Those that the host has not; one that it has, where it has all."""
    there = set(slots)
    return [expert for expert in range(experts) if expert not in there] or [slots[0]]


def _shared(slots: Sequence[int], before: Sequence[Sequence[int]]) -> list[list[int]]:
    """The experts behind these slots of one layer, each on one of the ranks, of which each has an expert at least."""
    wanted = list(dict.fromkeys(slots))
    ranks: list[list[int]] = [[] for _ in before]
    left = []
    for expert in wanted:
        having = [rank for rank, had in enumerate(before) if expert in had]
        if having:
            ranks[min(having, key=lambda rank: (len(ranks[rank]), rank))].append(expert)
        else:
            left.append(expert)
    for expert in left:
        min(ranks, key=len).append(expert)
    for rank in ranks:
        if not rank:  # a copy, which no row goes to
            rank.append(wanted[0])
    return ranks


def _filled(held: Sequence[int], slots: int) -> tuple[int, ...]:
    """With so many slots, of which those that are over hold again what is held anyway."""
    return tuple(held[slot % len(held)] for slot in range(slots))
