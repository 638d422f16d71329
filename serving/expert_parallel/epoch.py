"""An epoch of an expert group: who is in it, who holds what, and after which step it begins. One follows another.

Pure. Members keep their numbers for the group's life; ranks are numbered anew in each epoch, in the order of members.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from serving.expert_parallel.surviving import Brought, ExpertsLost, Placements, orphans, regrouped
from serving.model.expert_balance import ExpertPlacement


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """`members` by number, with the key of the process that has this place: one that comes back has another."""

    number: int
    members: Mapping[int, str]
    placements: Placements
    step: int  # that all members have completed
    loads: bool = False  # somebody loads experts before it begins

    @property
    def order(self) -> list[int]:
        """The member of each rank."""
        return sorted(self.members)

    def has(self, member: int, process: str) -> bool:
        return self.members.get(member) == process

    def encoded(self) -> str:
        placements = [{"experts": one.experts, "slots": one.slots} for one in self.placements]
        members = {str(member): process for member, process in self.members.items()}
        facts = {"number": self.number, "members": members, "step": self.step, "loads": self.loads}
        return json.dumps({**facts, "placements": placements})


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a member says when it ends an epoch."""

    step: int  # that it has completed
    lost: frozenset[int] = frozenset()  # members that it misses
    admits: Mapping[int, str] = field(default_factory=dict)  # members that wait to come in, with their processes
    held: Brought | None = None  # experts that it holds; None for those that the epoch has placed on it

    def encoded(self) -> str:
        admits = {str(member): process for member, process in self.admits.items()}
        return json.dumps({"step": self.step, "lost": sorted(self.lost), "admits": admits, "held": self.held})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What holds for every epoch of a group."""

    origin: Placements  # of all members: what each brings when it comes back
    most_slots: int  # experts of one layer that a rank has memory for
    loads: bool  # members can load experts that they do not hold


def report_of(text: str) -> Report:
    facts = json.loads(text)
    admits = {int(member): process for member, process in facts["admits"].items()}
    return Report(step=facts["step"], lost=frozenset(facts["lost"]), admits=admits, held=facts["held"])


def epoch_of(text: str) -> Epoch:
    """The epoch that was decided. Raises ExpertsLost where there is none because of that."""
    facts = json.loads(text)
    if "experts" in facts:
        raise ExpertsLost({int(layer): lost for layer, lost in facts["experts"].items()}, facts["reason"])
    placements = ((one["experts"], tuple(map(tuple, one["slots"]))) for one in facts["placements"])
    return Epoch(
        number=facts["number"],
        members={int(member): process for member, process in facts["members"].items()},
        placements=tuple(ExpertPlacement(slots, experts) for experts, slots in placements),
        step=facts["step"],
        loads=facts["loads"],
    )


def encoded_loss(lost: ExpertsLost) -> str:
    """For `epoch_of`, instead of an epoch."""
    return json.dumps({"experts": lost.experts, "reason": lost.reason})


def following(epoch: Epoch, reports: Mapping[int, Report], rules: Rules) -> Epoch:
    """The epoch after this one, of the members that have reported and those that they admit.

    It begins after the last step that all who reported have completed. Raises ExpertsLost for experts that nobody holds
    and nobody can load.
    """
    admitted = {member: process for report in reports.values() for member, process in report.admits.items()}
    members = {member: epoch.members[member] for member in reports if member not in admitted} | admitted
    ranks: list[int | Brought] = [
        brought(rules.origin, member) if member in admitted else _kept(epoch, member, reports[member])
        for member in sorted(members)
    ]
    nowhere = orphans(epoch.placements, ranks)
    if nowhere and not rules.loads:
        raise ExpertsLost(nowhere, "no rank that is left holds them, and none can load them")
    slots = len(rules.origin[0].slots[0])
    return Epoch(
        number=epoch.number + 1,
        members=members,
        placements=regrouped(epoch.placements, ranks, slots, rules.most_slots),
        step=min(report.step for report in reports.values()),
        loads=bool(nowhere),
    )


def missing(members: Iterable[int], reports: Mapping[int, Report], ended: Iterable[int]) -> tuple[set[int], set[int]]:
    """Of the members that have not reported: those that may yet, and those of them that nobody misses.

    A member whose process has ended will not; one that another misses may be alive and late.
    """
    silent = set(members) - set(reports) - set(ended)
    missed = {member for report in reports.values() for member in report.lost}
    return silent, silent - missed


def _kept(epoch: Epoch, member: int, report: Report) -> int | Brought:
    """What a member that stays holds: experts may have moved since the epoch began."""
    return epoch.order.index(member) if report.held is None else report.held


def brought(origin: Placements, member: int) -> Brought:
    """What a member holds that comes to a group."""
    return [placement.slots[member] for placement in origin]
