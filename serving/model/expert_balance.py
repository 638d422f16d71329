"""Where the experts of one layer are held: which of a group's ranks has which, and which of them several times.

Pure. A rank has a number of slots, a slot holds one expert, and a token that wants an expert goes to one of its copies,
evenly. The slowest rank is what a step waits for: a placement is as good as its heaviest rank is light.

`placed` starts from nothing, in the way of EPLB (github.com/deepseek-ai/EPLB): groups of experts are packed to nodes,
spare slots go to whatever expert has most load a copy, copies are packed to ranks. `replaced` starts from a placement
that serves, and changes few slots: each change is an expert's weights on the wire.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SHARP = 8  # of the power mean of ranks' loads that a search lowers: near enough to the largest to care for it alone
POLISHES = 200  # exchanges that a new placement is improved by, at most


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """`slots[rank]` are the experts that a rank holds. Raises ValueError where ranks differ, or an expert has none."""

    slots: tuple[tuple[int, ...], ...]
    experts: int

    def __post_init__(self) -> None:
        if len({len(rank) for rank in self.slots}) != 1:
            raise ValueError("every rank needs the same number of slots")
        if (held := {expert for rank in self.slots for expert in rank}) != set(range(self.experts)):
            raise ValueError(f"experts {sorted(set(range(self.experts)) ^ held)[:8]} are held nowhere, or do not exist")

    def copies(self) -> list[int]:
        """For each expert how many slots hold it."""
        counted = Counter(expert for rank in self.slots for expert in rank)
        return [counted[expert] for expert in range(self.experts)]

    def ranks_of(self, expert: int) -> list[int]:
        return [number for number, rank in enumerate(self.slots) if expert in rank]

    def loads(self, of_experts: Sequence[float]) -> list[float]:
        """Of each rank: an expert's load is shared by its copies."""
        copies = self.copies()
        return [sum(of_experts[expert] / copies[expert] for expert in rank) for rank in self.slots]

    def imbalance(self, of_experts: Sequence[float]) -> float:
        """The heaviest rank's load over the mean; 1 is the best there is, and what no load at all has."""
        loads = self.loads(of_experts)
        mean = sum(loads) / len(loads)
        return max(loads) / mean if mean > 0 else 1.0

    def moves_from(self, old: ExpertPlacement) -> int:
        """Slots that hold another expert than they did, however a rank orders its own."""
        return sum((Counter(new) - Counter(was)).total() for new, was in zip(self.slots, old.slots, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A group's ranks, in the order of their nodes, and how many experts each holds.

    `groups` of neighbouring experts stay on one node together, so that routing limited to groups is limited to nodes.
    """

    ranks: int
    slots: int  # of one rank
    nodes: int = 1
    groups: int = 1

    def check(self, experts: int) -> None:
        """Raises ValueError for what cannot be laid out."""
        if experts > self.ranks * self.slots:
            raise ValueError(f"{experts} experts do not fit {self.ranks} ranks of {self.slots} slots")
        if self.ranks % self.nodes or experts % self.groups:
            raise ValueError("ranks must be shared evenly by nodes, and experts by groups")
        if self.groups > 1 and self.groups % self.nodes:
            raise ValueError(f"{self.groups} groups of experts cannot be shared evenly by {self.nodes} nodes")


def placed(of_experts: Sequence[float], layout: Layout) -> ExpertPlacement:
    """A placement for experts of these loads. Raises ValueError where they do not fit."""
    experts = len(of_experts)
    layout.check(experts)
    if layout.groups == 1 or layout.nodes == 1:
        return ExpertPlacement(tuple(_on_ranks(range(experts), of_experts, layout.ranks, layout.slots)), experts)
    size, ranks = experts // layout.groups, layout.ranks // layout.nodes
    weights = [sum(of_experts[group * size : (group + 1) * size]) for group in range(layout.groups)]
    slots: list[tuple[int, ...]] = []
    for groups in _packed(weights, layout.nodes):
        own = [expert for group in sorted(groups) for expert in range(group * size, (group + 1) * size)]
        slots += _on_ranks(own, of_experts, ranks, layout.slots)
    return ExpertPlacement(tuple(slots), experts)


def _on_ranks(experts: Sequence[int], of_experts: Sequence[float], ranks: int, slots: int) -> list[tuple[int, ...]]:
    """These experts and copies of them, on so many ranks."""
    copies = dict.fromkeys(experts, 1)
    for _ in range(ranks * slots - len(experts)):
        # A second copy on one rank takes nothing off it: an expert has as many as there are ranks at most.
        spare = [expert for expert in experts if copies[expert] < ranks] or experts
        copies[max(spare, key=lambda expert: (of_experts[expert] / copies[expert], -expert))] += 1
    held = [expert for expert in experts for _ in range(copies[expert])]
    packed = _packed([of_experts[expert] / copies[expert] for expert in held], ranks, held)
    search = _Search([[held[place] for place in rank] for rank in packed], of_experts)
    for _ in range(POLISHES):
        if not search.exchange():
            break
    return [tuple(sorted(rank)) for rank in search.slots]


def _packed(weights: Sequence[float], bins: int, kinds: Sequence[int] | None = None) -> list[list[int]]:
    """The places of `weights` in as many bins of equal number: the heaviest first, each to the lightest with room.

    Two of one kind share a bin only where they must.
    """
    kinds = range(len(weights)) if kinds is None else kinds
    room = len(weights) // bins
    packed: list[list[int]] = [[] for _ in range(bins)]
    filled = [0.0] * bins
    held: list[set[int]] = [set() for _ in range(bins)]
    for place in sorted(range(len(weights)), key=lambda place: (-weights[place], place)):
        free = [number for number in range(bins) if len(packed[number]) < room]
        chosen = min(free, key=lambda number: (kinds[place] in held[number], filled[number], number))
        packed[chosen].append(place)
        filled[chosen] += weights[place]
        held[chosen].add(kinds[place])
    return packed


def replaced(
    old: ExpertPlacement, of_experts: Sequence[float], *, most_moves: int, target: float = 1.05
) -> ExpertPlacement:
    """`old` with at most `most_moves` slots changed, fewer where an imbalance of `target` comes sooner.

    Each step takes what lowers the load of the heaviest ranks most for each slot it changes: two ranks exchange an
    expert, or a spare copy makes place for another expert's. Groups of experts leave their node if that is lighter.
    """
    search = _Search([list(rank) for rank in old.slots], of_experts)
    best, least, spent = old.slots, search.imbalance(), 0
    while spent < most_moves and least > target:
        cost = search.improve(most_moves - spent)
        if not cost:
            break
        spent += cost
        if (found := search.imbalance()) < least:  # on the way, the heaviest rank may have become heavier
            best, least = tuple(tuple(rank) for rank in search.slots), found
    return ExpertPlacement(best, old.experts)


class _Search:
    """A placement that is changed step by step, each lowering the power mean of ranks' loads."""

    def __init__(self, slots: list[list[int]], of_experts: Sequence[float]) -> None:
        self.slots = slots
        self._weight = of_experts
        self._copies = Counter(expert for rank in slots for expert in rank)
        self._loads = [sum(self._share(expert) for expert in rank) for rank in slots]
        total = sum(self._loads)
        self._mean = total / len(slots) if total > 0 else 1.0

    def imbalance(self) -> float:
        return max(self._loads) / self._mean

    def exchange(self) -> bool:
        """The best exchange of two experts between the heaviest rank and another; False where none helps."""
        found = max(self._exchanges(), key=lambda change: change[0], default=None)
        if found is None or found[0] <= 0:
            return False
        self._swap(*found[1:])
        return True

    def improve(self, most: int) -> int:
        """Make the best change of at most `most` slots, and say how many it was; 0 where none helps."""
        overwrites = ((gain, 1, change) for gain, *change in self._overwrites())
        exchanges = ((gain / 2, 2, change) for gain, *change in self._exchanges()) if most > 1 else ()
        best = max((*overwrites, *exchanges), key=lambda found: found[0], default=None)
        if best is None or best[0] <= 0:
            return 0
        _, cost, change = best
        if cost == 1:
            self._overwrite(*change)
            return 1
        self._swap(*change)
        return 2

    def _share(self, expert: int) -> float:
        return self._weight[expert] / self._copies[expert]

    def _cost(self, load: float) -> float:
        return float((load / self._mean) ** SHARP)

    def _heaviest(self) -> int:
        return max(range(len(self.slots)), key=lambda rank: (self._loads[rank], -rank))

    def _exchanges(self) -> Iterator[tuple[float, int, int, int, int]]:
        """(gain, rank, slot, other rank, its slot) of exchanges with the heaviest rank, none twice on one."""
        heavy = self._heaviest()
        mine, load = self.slots[heavy], self._loads[heavy]
        before = self._cost(load)
        for other, theirs in enumerate(self.slots):
            if other == heavy:
                continue
            both = before + self._cost(self._loads[other])
            for i, given in enumerate(mine):
                for j, taken in enumerate(theirs):
                    change = self._share(given) - self._share(taken)
                    if change > 0 and given not in theirs and taken not in mine:
                        after = self._cost(load - change) + self._cost(self._loads[other] + change)
                        yield both - after, heavy, i, other, j

    def _swap(self, rank: int, slot: int, other: int, its_slot: int) -> None:
        given, taken = self.slots[rank][slot], self.slots[other][its_slot]
        self.slots[rank][slot], self.slots[other][its_slot] = taken, given
        change = self._share(given) - self._share(taken)
        self._loads[rank] -= change
        self._loads[other] += change

    def _overwrites(self) -> Iterator[tuple[float, int, int, int]]:
        """(gain, rank, slot, expert): one of several copies makes place for an expert of the heaviest rank."""
        holders: dict[int, list[int]] = {}
        for rank, held in enumerate(self.slots):
            for expert in held:
                holders.setdefault(expert, []).append(rank)
        for expert in set(self.slots[self._heaviest()]):
            for rank, held in enumerate(self.slots):
                if expert in held:
                    continue
                for slot, victim in enumerate(held):
                    if self._copies[victim] > 1:
                        yield self._gain(rank, victim, expert, holders), rank, slot, expert

    def _gain(self, rank: int, victim: int, expert: int, holders: dict[int, list[int]]) -> float:
        """What is saved where `victim` on `rank` becomes `expert`."""
        weight, lost = self._weight[expert], self._weight[victim]
        copies, left = self._copies[expert], self._copies[victim]
        changes: defaultdict[int, float] = defaultdict(float)
        for holder in holders[expert]:
            changes[holder] += weight / (copies + 1) - weight / copies
        for holder in holders[victim]:
            changes[holder] += lost / (left - 1) - lost / left
        changes[rank] += weight / (copies + 1) - lost / (left - 1)
        return sum(
            self._cost(self._loads[holder]) - self._cost(max(self._loads[holder] + change, 0.0))
            for holder, change in changes.items()
        )

    def _overwrite(self, rank: int, slot: int, expert: int) -> None:
        victim = self.slots[rank][slot]
        self.slots[rank][slot] = expert
        self._copies[victim] -= 1
        self._copies[expert] += 1
        self._loads = [sum(self._share(one) for one in held) for held in self.slots]
