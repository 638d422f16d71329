"""Experts move between real processes while these compute, and every step has the bits of one process."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from serving.expert_parallel.arena import ExpertArena, ExpertFormat, arena_bytes
from serving.expert_parallel.copies import CheckpointCopies, SharedMemoryCopies
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.layer import moe_layers
from serving.expert_parallel.meeting import MEETING_SECONDS
from serving.expert_parallel.rebalance import RebalanceStatus
from serving.expert_parallel.stages import WeightTransfer
from serving.model.expert_balance import ExpertPlacement
from tests.serving.expert_parallel.ranks import Ranks
from tests.serving.expert_parallel.rebalanced import (
    compute_while_experts_move,
    lose_a_rank_after_a_move,
    make_a_mistake_in_a_round,
    model_of,
)

Answer = tuple[int, list[int], list[list[ExpertPlacement]], RebalanceStatus]


@pytest.mark.parametrize(
    ("ranks", "spare", "weights", "copies"),
    [(2, 1, "int8", "shared_memory"), (3, 1, "float32", "all_to_all"), (2, 2, "int8", "checkpoint")],
)
def test_every_step_has_the_bits_of_one_process(ranks: int, spare: int, weights: str, copies: str) -> None:
    with Ranks() as group:
        started = group.start_all(ranks, compute_while_experts_move, ranks, spare, weights, copies, 2)
        answers: list[Answer] = [rank.answer() for rank in started]
    for steps, wrong, seen, status in answers:
        assert wrong == []
        assert (steps, seen) == answers[0][:1] + answers[0][2:3], "ranks have switched at different steps"
        assert status.failure is None
        assert status.switched >= 2
    before, *after = answers[0][2]
    assert all(one != before for one in after)
    assert sum(status.slots for *_, status in answers) > 0
    assert sum(status.bytes for *_, status in answers) > 0
    assert all(status.copied >= status.bytes for *_, status in answers), "what came had been counted as it came"


def test_experts_of_another_type_are_not_taken_for_those_that_compute() -> None:
    experts = {kind: next(moe_layers(model_of(kind)))[1].experts for kind in ("int8", "float32")}
    form = ExpertFormat.of(list(experts["int8"]))
    memory = torch.zeros(arena_bytes(form, 1, 2), dtype=torch.uint8)
    copies = CheckpointCopies(ExpertArena(form, 1, 2, memory), 0, lambda _, expert: experts["float32"][expert])
    with pytest.raises(ValueError, match="another type"):
        copies.run(0, [WeightTransfer(3, 1, 0, 0, 2)], lambda _: None)


def test_a_rank_is_lost_after_experts_have_moved() -> None:
    """Nothing is loaded: what nobody holds where the epoch has placed it has only moved."""
    with Ranks() as group:
        started = group.start_all(3, lose_a_rank_after_a_move)
        assert [rank.answer() for rank in started[:2]] == [[True] * 4] * 2


def test_a_mistake_of_the_thread_is_told_as_its_failure() -> None:
    """Whatever it is: who serves is to see that nothing moves any more."""
    with Ranks() as group:
        [rank] = group.start_all(1, make_a_mistake_in_a_round)
        assert rank.answer() == "KeyError: 'no such layer'"


def test_a_rank_that_ends_before_its_weights_are_shared_is_not_waited_for() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    form = ExpertFormat.of([nn.Linear(4, 4)])
    join = partial(SharedMemoryCopies.join, form, 1, 1, 0, 2, HashStore(), meeting=MEETING_SECONDS)
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 .* its process has ended"):
        join(processes={1: ended.pid})
    assert time.monotonic() - began < MEETING_SECONDS / 2
    assert ended.wait() == 0
