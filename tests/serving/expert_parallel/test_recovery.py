"""Members that are killed or stopped in the middle of a step: the others repeat it, and it has the bits of one process.

That every step has them is asserted by the members themselves (recovering.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from serving.expert_parallel.membership import GRACE
from tests.fakes.awake import retaken
from tests.fakes.stopping import harm, stop
from tests.serving.expert_parallel.ranks import Rank, Ranks, keep_store
from tests.serving.expert_parallel.recovering import Case, Ended, Seen, decode, write_mixture
from tests.serving.expert_parallel.served import NEW_TOKENS

NOTICED = 0.05  # seconds after a kill
DEADLINE = 1.0  # of members that are stopped
FEW, MANY = 1, int(os.environ.get("MILLRACE_LOSSES", "2"))  # MILLRACE_LOSSES=100 takes a quarter of an hour
MEASURED = 100  # trials whose times are held to what is promised: fewer say more about the machine
TRIALS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]
SETTLED = 15.0  # seconds until what an exchange has left behind is closed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("recovery") / "mixtral")


@dataclass
class Took:
    """Seconds of each trial: until all had noticed, until they computed again, and when the member came back."""

    noticed: list[float]
    stalled: list[float]
    rejoined: list[float]

    def __str__(self) -> str:
        figures = (("noticed", self.noticed), ("stalled", self.stalled), ("rejoined", self.rejoined))
        return "; ".join(f"{name} {sorted(of)[len(of) // 2]:.4f} s, most {max(of):.4f} s" for name, of in figures)


def seen(ranks: Sequence[Rank], epoch: int, members: list[int]) -> list[Seen]:
    answers = [rank.answer() for rank in ranks]
    assert [(one.epoch, one.members) for one in answers] == [(epoch, members)] * len(ranks), answers
    return answers


def settled(rank: Rank, wanted: Counter[str] | None) -> Counter[str]:
    """What a member has open, when that is what is wanted."""
    until = time.monotonic() + SETTLED
    while True:
        found: Counter[str] = rank.ask().descriptors
        if wanted in (None, found):
            return found
        assert time.monotonic() < until, found - wanted if wanted else found


def wakes_and_ends(stopped: Rank) -> None:
    os.kill(stopped.pid, signal.SIGCONT)
    ended: Ended = stopped.answer()
    assert ended.error == "DeclaredLost", ended


def lose_and_come_back(case: Case, victim: int, how: signal.Signals, trials: int) -> Took:
    """A member is lost and another process takes its place, again and again."""
    took, everyone = Took([], [], []), list(range(case.ranks))
    others, stalled = [member for member in everyone if member != victim], 0.0
    with Ranks() as group:
        survivors = group.start_all(case.ranks, decode, case)
        seen(survivors, 0, everyone)
        lost = survivors.pop(victim)
        opened = {rank.rank: settled(rank, None) for rank in survivors}
        for trial in range(trials):
            began = time.monotonic()
            harm(lost.pid, how)
            after = seen(survivors, 2 * trial + 1, others)
            took.noticed.append(max(one.counts.noticed for one in after) - began)
            took.stalled.append(max(one.counts.stalled_seconds for one in after) - stalled)
            assert [one.counts.losses for one in after] == [trial + 1] * len(survivors)
            loaded = sum(one.counts.loaded_experts for one in after)
            assert (loaded > 0) is (case.spare == 0)
            if how == signal.SIGSTOP and trial % 2 == 0:
                wakes_and_ends(lost)
            stalled = max(one.counts.stalled_seconds for one in after)
            before, lost = lost, group.start(victim, decode, case)
            after = seen([*survivors, lost], 2 * trial + 2, everyone)
            took.rejoined.append(max(one.counts.stalled_seconds for one in after) - stalled)
            stalled = max(one.counts.stalled_seconds for one in after)
            if how == signal.SIGSTOP and trial % 2 == 1:
                wakes_and_ends(before)  # when its place is taken
            before.close()
            for rank in survivors:
                settled(rank, opened[rank.rank])
    print(f"{case.kind}, {how.name}, {case.spare} spare slots, {trials} times: {took}")
    return took


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize(("kind", "spare", "victim"), [("shared_memory", 3, 2), ("all_to_all", 0, 0)])
@retaken
def test_a_killed_member_is_done_without_and_comes_back(
    folder: Path, kind: str, spare: int, victim: int, trials: int
) -> None:
    took = lose_and_come_back(Case(folder=folder, kind=kind, spare=spare), victim, signal.SIGKILL, trials)
    if trials >= MEASURED:
        assert sorted(took.noticed)[trials // 2] < NOTICED
    assert max(took.stalled) < GRACE * Case.deadline  # nobody waited for one that had ended


@pytest.mark.parametrize(
    ("kind", "spare", "victim", "trials"),
    [
        ("shared_memory", 0, 0, FEW),
        pytest.param("shared_memory", 0, 0, MANY, marks=pytest.mark.slow),
        pytest.param("all_to_all", 3, 2, MANY, marks=pytest.mark.slow),
    ],
)
@retaken
def test_a_stopped_member_is_done_without_and_ends_when_it_wakes(
    folder: Path, kind: str, spare: int, victim: int, trials: int
) -> None:
    case = Case(folder=folder, kind=kind, spare=spare, deadline=DEADLINE)
    took = lose_and_come_back(case, victim, signal.SIGSTOP, trials)
    assert min(took.noticed) > 0.9 * DEADLINE
    if trials >= MEASURED:
        assert sorted(took.noticed)[trials // 2] < 1.1 * DEADLINE


def test_two_members_lost_at_once(folder: Path) -> None:
    with Ranks() as group:
        ranks = group.start_all(4, decode, Case(folder=folder, ranks=4))
        seen(ranks, 0, [0, 1, 2, 3])
        for rank in ranks[2:]:
            os.kill(rank.pid, signal.SIGKILL)
        for rank in ranks[:2]:
            after: Seen = rank.answer()
            while after.members != [0, 1]:  # one was noticed before the other had ended
                after = rank.answer()
            assert after.counts.losses == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
@retaken
def test_a_member_lost_in_the_recovery_leaves_the_last_alone(folder: Path, how: signal.Signals) -> None:
    limit = Case.deadline if how == signal.SIGKILL else DEADLINE
    with Ranks() as group:
        case = Case(folder=folder, dies_loading=0, how=how, deadline=limit, loading=limit)
        ranks = group.start_all(3, decode, case)
        seen(ranks, 0, [0, 1, 2])
        os.kill(ranks[2].pid, signal.SIGKILL)
        (alone,) = seen(ranks[1:2], 2, [1])
        assert alone.counts.losses == 2 and alone.counts.loaded_experts > 0
        assert ranks[1].ask().steps > alone.steps
        if how == signal.SIGSTOP:
            wakes_and_ends(ranks[0])


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
@retaken
def test_a_member_lost_while_it_comes_back(folder: Path, how: signal.Signals) -> None:
    case = Case(folder=folder, ranks=2, meeting=1.0)
    with Ranks() as group:
        ranks = group.start_all(2, decode, case)
        seen(ranks, 0, [0, 1])
        os.kill(ranks[1].pid, signal.SIGKILL)
        seen(ranks[:1], 1, [0])
        coming = group.start(1, decode, replace(case, dies_joining=(1, 2), how=how, deadline=DEADLINE))
        (alone,) = seen(ranks[:1], 3, [0])
        assert (alone.counts.losses, alone.counts.admitted) == (2, 1)
        back = group.start(1, decode, case)
        seen([ranks[0], back], 4, [0, 1])
        if how == signal.SIGSTOP:
            wakes_and_ends(coming)


@pytest.mark.parametrize("halves", [1, 2])
def test_members_that_completed_the_step_repeat_it_idly(folder: Path, halves: int) -> None:
    combines = 3 * 2 * halves  # the layers of two steps: member 1 drops the second, which the others have completed
    case = Case(folder=folder, misses=(1, combines), most_steps=2 * NEW_TOKENS, halved=halves > 1)
    with Ranks() as group:
        ranks = group.start_all(3, decode, case)
        seen(ranks, 0, [0, 1, 2])
        after = seen(ranks, 1, [0, 1, 2])
        ended = [rank.answer() for rank in ranks]
    assert [one.steps for one in after] == [3, 2, 3]
    assert [one.losses for one in ended] == [0, 0, 0]  # who was a step behind would have been left alone at the end


def test_experts_that_nobody_can_have_are_named(folder: Path) -> None:
    with Ranks() as group:
        ranks = group.start_all(2, decode, Case(folder=folder, ranks=2, loads=False))
        seen(ranks, 0, [0, 1])
        os.kill(ranks[1].pid, signal.SIGKILL)
        ended: Ended = ranks[0].answer()
    assert ended.error == "ExpertsLost" and "layer 2: " in ended.text


@pytest.mark.parametrize(
    ("kind", "how"),
    [("shared_memory", signal.SIGKILL), pytest.param("all_to_all", signal.SIGSTOP, marks=pytest.mark.slow)],
)
@retaken
def test_a_store_that_has_stopped_holds_nobody_up(folder: Path, kind: str, how: signal.Signals) -> None:
    with Ranks() as group:
        keeper = group.start(0, keep_store)
        group.port = keeper.answer()
        case = Case(folder=folder, kind=kind, ranks=3, spare=3, deadline=DEADLINE, store=1.5)
        ranks = group.start_all(3, decode, case)
        before = seen(ranks, 0, [0, 1, 2])
        stop(keeper.pid)
        assert ranks[0].ask().steps > before[0].steps  # a step asks the store nothing
        harm(ranks[2].pid, how)
        assert [rank.answer().error for rank in ranks[:2]] == ["StoreUnavailable"] * 2
