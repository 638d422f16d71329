"""A group of real processes computes what one process does, to the bit, and names a rank that it loses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serving.batch.layer_barrier import LayerBarrier
from serving.child_process import helper_environ, module_command
from serving.expert_parallel.exchange import RankLost
from serving.rank_group.channel import Channel
from serving.rank_group.division import divided
from serving.rank_group.leader import SpreadModel, join_group, load_spread
from serving.rank_group.ranks import RANK_MODULE
from tests.serving.model.oracle import build, configs, save
from tests.serving.rank_group.groups import (
    BLOCK,
    BLOCKS_EACH,
    LENGTHS,
    Side,
    alone,
    exists,
    group_forward,
    pids,
    spread_over,
)

NEW_TOKENS = 4
MOST = range(len(LENGTHS))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(configs()["mixtral"]), tmp_path_factory.mktemp("mixtral"))


def compare(folder: Path, spread: SpreadModel) -> None:
    """A sequence alone in its step, then all in one: as one process computes the rows that each rank does."""
    reference = alone(folder)
    group, one = Side(group_forward(spread)), Side(reference)
    assert group.forward.form != reference.form, "step costs of the two are kept apart"
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


def test_signals_to_leave_are_the_leaders_to_hear(mixtral: Path) -> None:
    """Who ends a service may tell all its processes at once: what runs is to be finished all the same."""
    with spread_over(mixtral, 2, deadline=2.0) as spread:
        group = Side(group_forward(spread))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(*pids(spread), number)
            group.step(MOST)
        assert spread.ranks.lost is None


def test_a_rank_that_comes_up_after_its_leader_has_ended_leaves() -> None:
    """Though somebody else holds the leader's end of the channel, or has its number by now."""
    ours, theirs = Channel.pair()
    with theirs:
        process = subprocess.Popen(
            [*module_command(RANK_MODULE), str(theirs.fileno()), str(os.getppid())],
            pass_fds=(theirs.fileno(),),
            env=helper_environ(os.environ),
        )
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        ours.close()


@pytest.mark.slow
def test_steps_of_any_number_of_tokens_may_be_asked_for(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step has more rows than there is KV for; where these find no memory, it is said what to do."""

    def meet(*_: object) -> None:
        raise RuntimeError("can't allocate memory\nframe #0")

    with spread_over(mixtral, 2) as spread:
        planes = spread.ranks.share_planes(spread.spec.kv_layers("float32"), BLOCKS_EACH * len(LENGTHS), BLOCK)
        with (
            monkeypatch.context() as patch,
            pytest.raises(ValueError, match=r"lower --max-num-batched-.*allocate memory$"),
        ):
            patch.setattr(spread.ranks, "meet", meet)
            join_group(spread, planes, 64)
        group = Side(join_group(spread, planes, 2**32 + 1))
        group.step(MOST)
        assert spread.ranks.exchange is not None
        assert spread.ranks.exchange.shape.max_tokens == BLOCKS_EACH * len(LENGTHS) * BLOCK


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
def test_what_cannot_be_loaded_leaves_no_process(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(mixtral, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    seen: list[int] = []
    with pytest.raises(ValueError, match="checkpoint lacks"), monkeypatch.context() as patch:
        start = os.pidfd_open

        def noted(pid: int, flags: int = 0) -> int:
            seen.append(pid)
            return start(pid, flags)

        patch.setattr(os, "pidfd_open", noted)
        load_spread(folder, "float32", None, 2, 1.0)
    assert seen and not any(map(exists, seen))
