"""A group of real processes computes what one process does, to the bit, and its processes leave with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from serving.channel import Channel
from serving.child_process import helper_environ, module_command
from serving.rank_group import ranks
from serving.rank_group.child import RANK_MODULE, RankProcess
from serving.rank_group.division import divided
from serving.rank_group.leader import SpreadModel, join_group, load_spread
from tests.fakes.stopping import harm
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
    wait_at_a_barrier,
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
    traffic = spread.ranks.totals.traffic
    assert min(traffic.dispatch_bytes, traffic.combine_bytes) > 0
    assert spread.ranks.lost is None
    wait_at_a_barrier(group, one, equal)


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(found, wanted)


def test_a_group_computes_the_bits_of_one_process(mixtral: Path) -> None:
    with spread_over(mixtral, 2) as spread:
        compare(mixtral, spread)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("qwen3_moe_dense", 4), ("deepseek_v2", 2)])
def test_groups_of_any_model_and_size_compute_the_bits_of_one_process(name: str, size: int, tmp_path: Path) -> None:
    folder = save(build(configs()[name]), tmp_path)
    with spread_over(folder, size) as spread:
        compare(folder, spread)


def test_signals_to_leave_are_the_leaders_to_hear(mixtral: Path) -> None:
    """Who ends a service may tell all its processes at once: what runs is to be finished all the same."""
    with spread_over(mixtral, 2, deadline=60.0) as spread:
        group = Side(group_forward(spread))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            harm(*pids(spread), number)
            group.step(MOST)
        assert spread.ranks.counts.losses == 0


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
        assert spread.ranks.most_rows == BLOCKS_EACH * len(LENGTHS) * BLOCK


@pytest.mark.slow
def test_what_cannot_be_loaded_leaves_no_process(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(mixtral, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    seen: list[int] = []

    def noted(rank: int) -> RankProcess:
        process = RankProcess(rank)
        seen.append(process.process.pid)
        return process

    monkeypatch.setattr(ranks, "RankProcess", noted)
    with pytest.raises(ValueError, match="checkpoint lacks"):
        load_spread(folder, "float32", None, 2, 1.0)
    assert seen and not any(map(exists, seen))
