"""Members agree on each epoch, though some are late, silent, or speak of an epoch that is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from torch.distributed import HashStore

from serving.expert_parallel.bounded import BoundedStore
from serving.expert_parallel.epoch import Epoch, Report, Rules
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.membership import DeclaredLost, Door, Membership
from serving.expert_parallel.processes import ProcessWatch
from serving.expert_parallel.surviving import ExpertsLost
from serving.model.expert_balance import ExpertPlacement
from tests.fakes.awake import retaken

Answer = TypeVar("Answer")
DEADLINE = 0.3
RULES = Rules(origin=(ExpertPlacement(((0, 1), (1, 2), (2, 0)), experts=3),), most_slots=3, loads=True)
NOBODY = ProcessWatch({})  # the members are threads of this process: none of them ends


def at_once(*acts: Callable[[], Answer]) -> list[Answer]:
    with ThreadPoolExecutor(len(acts)) as threads:
        return [done.result() for done in [threads.submit(act) for act in acts]]


class Members:
    def __init__(self) -> None:
        self.store = HashStore()
        self.all = [self.new(member) for member in range(3)]
        self.first, *others = at_once(*(lambda one=one: one.begin(10.0) for one in self.all))  # type: ignore[misc]
        assert others == [self.first] * 2

    def new(self, member: int) -> Membership:
        return Membership(BoundedStore(self.store), member, RULES, DEADLINE)

    def end(self, epoch: Epoch, reports: dict[int, Report]) -> list[Epoch]:
        """What these members come to, who have all reported and wait at once: none is lost that begins late."""
        for member, report in reports.items():
            self.all[member].report(epoch, report)
        return at_once(*(lambda m=member: self.all[m].following(epoch, NOBODY) for member in reports))  # type: ignore[misc]


@retaken
def test_who_is_silent_is_left_out_and_told_so_when_it_speaks() -> None:
    members = Members()
    after = members.end(members.first, {0: Report(step=4), 1: Report(step=5)})
    assert [one.order for one in after] == [[0, 1]] * 2 and after[0] == after[1]
    assert (after[0].number, after[0].step) == (1, 4)
    late = members.all[2]
    late.report(members.first, Report(step=2, lost=frozenset({0, 1})))
    with pytest.raises(DeclaredLost, match=r"member 2.* epoch 1 is without it"):
        late.following(members.first, NOBODY)


@retaken
def test_a_report_on_an_epoch_that_is_over_counts_for_none_that_follows() -> None:
    members = Members()
    epoch, _ = members.end(members.first, {0: Report(step=4), 1: Report(step=4)})
    members.all[2].report(members.first, Report(step=0))
    later, _ = members.end(epoch, {0: Report(step=9), 1: Report(step=9)})
    assert (later.order, later.step) == ([0, 1], 9)


def test_whom_another_misses_is_kept_if_it_speaks() -> None:
    """While the others wait for it already."""
    members, missing = Members(), frozenset({2})
    for one in members.all:
        one.deadline = 600.0
    with ThreadPoolExecutor(2) as threads:
        waiting = []
        for member, report in ((0, Report(step=1, lost=missing)), (1, Report(step=1))):
            members.all[member].report(members.first, report)
            waiting.append(threads.submit(members.all[member].following, members.first, NOBODY))
        members.all[2].report(members.first, Report(step=1))
        after = [members.all[2].following(members.first, NOBODY), *(one.result() for one in waiting)]
    assert [one.order for one in after] == [[0, 1, 2]] * 3


@retaken
def test_who_is_missed_by_the_others_is_not_waited_for_long() -> None:
    members = Members()
    missing = frozenset({2})
    for one in members.all:
        one.deadline = 5.0
    began = time.monotonic()
    members.end(members.first, {0: Report(step=1, lost=missing), 1: Report(step=1, lost=missing)})
    assert time.monotonic() - began < 5.0


@retaken
def test_a_member_comes_back_under_its_number() -> None:
    members = Members()
    epoch, _ = members.end(members.first, {0: Report(step=4), 1: Report(step=4)})
    back = members.new(2)
    with ThreadPoolExecutor(1) as thread:
        entering = thread.submit(back.begin, 10.0)
        door = Door(members.all[0].store, 3)
        until = time.monotonic() + 10.0
        while not door.waiting:
            assert time.monotonic() < until
        door.close()
        assert door.waiting == {2: back.process}
        admitted, _ = members.end(epoch, {0: Report(step=7, admits=door.waiting), 1: Report(step=7)})
        assert entering.result() == admitted
    assert (admitted.number, admitted.order, admitted.step) == (2, [0, 1, 2], 7)
    assert members.store.get("knock/2") == b""  # it asks no longer


def test_who_is_never_admitted_is_told() -> None:
    members = Members()
    with pytest.raises(DeclaredLost):
        members.new(2).begin(0.05)
    assert members.store.get("knock/2") == b""  # nobody is to wait for it


def test_all_are_ready_or_nobody_is() -> None:
    members = Members()
    lost = ExpertsLost({0: [1]}, "the disk is gone")

    def ready(member: int) -> str:
        try:
            members.all[member].ready(members.first, lost if member == 1 else None, NOBODY, 60.0)
        except ExpertsLost as error:
            return str(error)
        return ""

    assert at_once(*(lambda m=member: ready(m) for member in range(3))) == [str(lost)] * 3  # type: ignore[misc]


def test_who_is_not_ready_in_time_is_named() -> None:
    members = Members()
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 .*not ready within") as late:
        members.all[0].ready(members.first, None, NOBODY, 0.05)
    assert late.value.rank == 1 and time.monotonic() - began >= 0.05
