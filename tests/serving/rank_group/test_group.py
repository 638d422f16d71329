"""A group of real processes computes what one process does, to the bit, and names a rank that it loses."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serving.batch.layer_barrier import LayerBarrier
from serving.expert_parallel.exchange import RankLost
from serving.rank_group.division import divided
from serving.rank_group.leader import SpreadModel, load_spread
from tests.serving.model.oracle import build, configs, save
from tests.serving.rank_group.groups import LENGTHS, Side, alone, exists, group_forward, pids, spread_over

NEW_TOKENS = 4
MOST = range(len(LENGTHS))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(configs()["mixtral"]), tmp_path_factory.mktemp("mixtral"))


def compare(folder: Path, spread: SpreadModel) -> None:
    """A sequence alone in its step, then all in one: as one process computes the rows that each rank does."""
    reference = alone(folder)
    group, one = Side(group_forward(spread)), Side(reference)
    for _ in range(NEW_TOKENS):
        for sequence in MOST:
            assert torch.equal(group.step([sequence]), one.step([sequence]))
    assert group.layers == list(range(spread.spec.layers))
    for _ in range(NEW_TOKENS):
        parts = divided([1] * len(LENGTHS), [len(tokens) for tokens in group.tokens], spread.ranks.size)
        found, hidden = group.step(MOST), torch.empty(len(LENGTHS), spread.spec.hidden)
        for part in filter(None, parts):
            hidden[part] = one.hidden(part)
        with torch.inference_mode():
            wanted = reference.model.logits(hidden)
        assert torch.equal(found, wanted)
        one.take(MOST, wanted)
    assert group.tokens == one.tokens
    assert min(spread.ranks.traffic.dispatch_bytes, spread.ranks.traffic.combine_bytes) > 0
    assert spread.ranks.lost is None
    wait_at_a_barrier(group, one)


def wait_at_a_barrier(group: Side, one: Side) -> None:
    """A step waits for its whole prefix; where it leaves, the ranks have not begun."""
    barrier, layers = LayerBarrier(), len(group.forward.planes)
    batch = group.batch([0])
    barrier.open(layers - 1)
    barrier.hurry()
    with torch.inference_mode():
        group.forward.logits(replace(batch, barrier=barrier), None)
        assert barrier.left
        barrier.begin()
        barrier.open(layers)
        assert torch.equal(group.forward.logits(replace(batch, barrier=barrier), None), one.step([0]))
    assert not barrier.left


def test_a_group_computes_the_bits_of_one_process(mixtral: Path) -> None:
    with spread_over(mixtral, 2) as spread:
        compare(mixtral, spread)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("qwen3_moe_dense", 4), ("deepseek_v2", 2)])
def test_groups_of_any_model_and_size_compute_the_bits_of_one_process(name: str, ranks: int, tmp_path: Path) -> None:
    folder = save(build(configs()[name]), tmp_path)
    with spread_over(folder, ranks) as spread:
        compare(folder, spread)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_is_named_and_no_process_stays(mixtral: Path, signal_number: signal.Signals) -> None:
    with spread_over(mixtral, 3, deadline=2.0) as spread:
        group, running = Side(group_forward(spread)), pids(spread)
        group.step(MOST)
        os.kill(running[1], signal_number)
        began = time.monotonic()
        with pytest.raises(RankLost, match="rank 2") as lost:
            for _ in range(1000):
                group.step(MOST)
        assert lost.value.rank == 2
        assert time.monotonic() - began < 60, "within the deadline, and what a busy machine adds"
        with pytest.raises(RankLost, match="rank 2"):
            group.step(MOST)
    assert not any(map(exists, running))


@pytest.mark.slow
def test_a_step_that_the_leader_does_not_finish_is_the_last(mixtral: Path) -> None:
    with spread_over(mixtral, 2, deadline=2.0) as spread:
        group = Side(group_forward(spread))
        group.tokens[0][0] = 10**9  # no token of the model
        with pytest.raises(IndexError):
            group.step([0])
        with pytest.raises(RankLost, match="unfinished"):
            group.step([1])


@pytest.mark.slow
def test_what_cannot_be_loaded_leaves_no_process(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    with pytest.raises(ValueError, match="millrace quantize"), monkeypatch.context() as patch:
        start = os.pidfd_open

        def noted(pid: int, flags: int = 0) -> int:
            seen.append(pid)
            return start(pid, flags)

        patch.setattr(os, "pidfd_open", noted)
        load_spread(mixtral, "float32", "int8", 2, 1.0)
    assert seen and not any(map(exists, seen))
