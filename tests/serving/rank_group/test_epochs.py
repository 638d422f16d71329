"""Epochs of a group whose ranks are lost one upon the other: told by processes that are none."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from serving.expert_parallel.epoch import Rules
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.surviving import Brought, Placements
from serving.model.expert_balance import ExpertPlacement
from serving.rank_group.child import RankProcess
from serving.rank_group.epochs import LOADING_SECONDS, GroupEpochs
from serving.rank_group.host_plan import HostPlace
from serving.rank_group.member import EpochMember
from serving.rank_group.messages import BeginEpoch, EndEpoch, EpochBegun, EpochEnded, ExpertsHeld, HoldExperts

DEADLINE = 10.0
ORIGIN: Placements = (ExpertPlacement(((0, 1), (2, 3), (4, 5)), 6),)


def origin_of(rank: int) -> Brought:
    return [placement.slots[rank] for placement in ORIGIN]


@dataclass
class ToldRank:
    """A rank's process: what it holds in the present epoch, what it is asked, and how long it is waited for."""

    rank: int
    held: Brought | None = None
    fails: bool = False  # when it is to hold experts
    owed: int = 0
    killed: bool = False
    waits: list[tuple[type, float]] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    @property
    def process(self) -> SimpleNamespace:
        return SimpleNamespace(pid=1000 + self.rank)

    def ask(self, word: object, _: float) -> None:
        if self.killed:
            raise RankLost(self.rank, "it has ended")
        self.asked.append(word)
        self.owed += 1

    def answer(self, kind: type, seconds: float) -> object:
        self.owed -= 1
        self.waits.append((kind, seconds))
        match self.asked.pop():
            case EndEpoch():
                return EpochEnded(self.held)
            case HoldExperts() as order:
                if self.fails:
                    self.killed = True
                    raise RankLost(self.rank, "it has ended")
                return ExpertsHeld()
            case BeginEpoch() as order:
                self.held = [placement.slots[order.rank] for placement in order.placements]
                return EpochBegun()
        raise AssertionError

    def kill(self, _: float) -> None:
        self.killed = True


class ToldLeader:
    """The leader's own part."""

    balances = False

    def __init__(self) -> None:
        self.placements: Placements = ()

    def hold(self, *_: object) -> int:
        return 0

    def begin(self, order: BeginEpoch) -> None:
        self.placements = order.placements

    def leave(self) -> None: ...

    def end(self) -> Brought:
        return [placement.slots[0] for placement in self.placements]


@pytest.fixture
def group() -> tuple[GroupEpochs, dict[int, ToldRank]]:
    rules = Rules(origin=ORIGIN, most_slots=6, loads=True)
    made = GroupEpochs(cast(EpochMember, ToldLeader()), rules, DEADLINE)
    ranks = {rank: ToldRank(rank) for rank in (1, 2)}
    made.begin(processes(ranks), DEADLINE)
    return made, ranks


def processes(ranks: dict[int, ToldRank]) -> dict[int, RankProcess]:
    return {rank: cast(RankProcess, told) for rank, told in ranks.items()}


def test_a_rank_that_ends_while_another_is_taken_in_costs_no_more_than_itself(
    group: tuple[GroupEpochs, dict[int, ToldRank]],
) -> None:
    """Who has come has computed nothing yet, and holds what it brought."""
    told, ranks = group
    ranks[2].killed = True
    told.follow(RankLost(2, "it has ended"), "a loss", 0.0, {})
    assert told.epoch.order == [0, 1]
    ranks[1].fails = True
    came = ToldRank(2)
    told.follow(None, "rank 2 has come back", 0.0, processes({2: came}))
    assert told.epoch.order == [0, 2]
    assert set(origin_of(2)[0]) <= set(told.epoch.placements[0].slots[1])
    assert {expert for rank in told.epoch.placements[0].slots for expert in rank} == set(range(6))


def test_a_rank_that_ends_while_others_load_costs_none_of_those(group: tuple[GroupEpochs, dict[int, ToldRank]]) -> None:
    """They are heard before the epoch is given up, however long they load: who owes a word then counts as hanging."""
    told, ranks = group
    ranks[1].fails = True
    told.follow(None, "the leader has left a step unfinished", 0.0, {})
    assert told.epoch.order == [0, 2]
    assert not ranks[2].owed
    assert not ranks[2].killed


def test_a_log_says_what_is_done_about_who_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """A host of ranks is not the leader's to start, and is called by its ranks, not by its number in the group."""
    rules = Rules(origin=ORIGIN, most_slots=6, loads=True)
    hosts = {2: HostPlace(2, 4)}
    told, ranks = GroupEpochs(cast(EpochMember, ToldLeader()), rules, DEADLINE, hosts), {r: ToldRank(r) for r in (1, 2)}
    told.begin(processes(ranks), DEADLINE)
    for lost, told_of in ((1, "rank 1 is lost.*it is started again"), (2, "the host of ranks 2 to 5 is lost.*waited")):
        caplog.clear()
        ranks[lost].killed = True
        why = RankLost(lost, "it has ended")
        told.follow(why, told.told(why), 0.0, {})
        assert re.search(told_of, caplog.text)
        assert "rank 2" not in caplog.text and "ranks [" not in caplog.text
        assert ("started again" in caplog.text) is (lost == 1)
    told.follow(None, "it has come", 0.0, processes({2: ToldRank(2)}))
    assert "the host of ranks 2 to 5 has come back" in caplog.text


def test_ranks_have_time_to_load_only_where_somebody_loads(group: tuple[GroupEpochs, dict[int, ToldRank]]) -> None:
    """One that hangs meanwhile holds the others up for the deadline alone."""
    told, ranks = group
    ranks[2].killed = True
    told.follow(RankLost(2, "it has ended"), "a loss", 0.0, {})
    came = ToldRank(2)
    told.follow(None, "rank 2 has come back", 0.0, processes({2: came}))
    waited = [[seconds for kind, seconds in one.waits if kind is ExpertsHeld] for one in (ranks[1], came)]
    assert waited == [[DEADLINE, DEADLINE + LOADING_SECONDS, DEADLINE], [DEADLINE]]
