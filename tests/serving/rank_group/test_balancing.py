"""Experts that move between the ranks of a served group: the text is the same, also when a rank is lost meanwhile."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from serving.expert_parallel.replanning import BalancePolicy
from serving.model.expert_balance import ExpertPlacement
from serving.rank_group.member import EpochMember
from serving.rank_group.messages import Balancing
from serving.rank_group.ranks import RankGroup
from tests.serving.model.oracle import build, configs, save
from tests.serving.rank_group.groups import (
    LENGTHS,
    NEEDS_KERNELS,
    Side,
    alone,
    compiled_alone,
    group_forward,
    pids,
    prompt,
    spread_over,
)

EAGER = BalancePolicy(above=1.02, target=1.0, least_gain=0.01, fewest_rows=1, kept=0.0)
BALANCING = Balancing(policy=EAGER, interval=4, bytes_per_second=1e9)
ALL = range(len(LENGTHS))
SLOW_SECONDS = 0.2
MOVING_SECONDS = 90.0  # that a busy machine may need for a plan


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(configs()["mixtral"]), tmp_path_factory.mktemp("mixtral"))


class Texts:
    """The same texts again and again, by the group and by one process; a turn compares them."""

    def __init__(self, ranks: RankGroup, group: Side, reference: Side) -> None:
        self.ranks, self.group, self.reference = ranks, group, reference

    def turn(self) -> None:
        for side in (self.group, self.reference):
            side.done = [0] * len(LENGTHS)
            side.tokens = [prompt(number, length) for number, length in enumerate(LENGTHS)]
            for _ in range(3):
                side.step(ALL)
        assert self.group.tokens == self.reference.tokens

    def until_moved(self) -> None:
        """Turns until experts have moved that had not, and one that computes with them."""
        before = self.ranks.placements
        until = time.monotonic() + MOVING_SECONDS
        while self.ranks.placements == before:
            assert time.monotonic() < until, "nothing moves"
            self.turn()
        self.turn()


def test_what_a_switch_takes_of_a_step_is_told(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest of all epochs, by the leader."""
    placed = EpochMember._placed

    def slowly(self: EpochMember, layer: int, placement: ExpertPlacement) -> None:
        time.sleep(SLOW_SECONDS)
        placed(self, layer, placement)

    monkeypatch.setattr(EpochMember, "_placed", slowly)
    with spread_over(mixtral, 3, redundant=3, balancing=BALANCING) as spread:
        texts = Texts(spread.ranks, Side(group_forward(spread, compiled=False)), Side(alone(mixtral)))
        texts.turn()
        texts.until_moved()
        longest = spread.ranks.switch_seconds
        assert longest >= SLOW_SECONDS
        monkeypatch.undo()
        os.kill(pids(spread)[1], signal.SIGKILL)
        texts.turn()
        assert spread.ranks.counts.losses == 1  # the rank may be back already
        assert spread.ranks.switch_seconds >= longest


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=NEEDS_KERNELS)])
def test_experts_move_while_texts_go_on_and_a_rank_is_lost(
    compiled: bool, mixtral: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Balanced, lost with its experts where they have moved to, and balanced again by those that are left."""
    one = compiled_alone(mixtral) if compiled else alone(mixtral)
    with spread_over(mixtral, 3, redundant=3, balancing=BALANCING) as spread:
        texts = Texts(spread.ranks, Side(group_forward(spread, compiled=compiled)), Side(one))
        texts.until_moved()
        assert spread.ranks.totals.moved_bytes > 0
        assert spread.ranks.imbalance >= 1
        os.kill(pids(spread)[1], signal.SIGKILL)
        texts.turn()
        assert re.search(r"goes on with rank 0, rank 1, \d", caplog.text)  # the other may be back already
        texts.until_moved()
        assert spread.ranks.lost is None
