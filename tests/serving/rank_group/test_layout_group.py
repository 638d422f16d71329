"""A group that shares one model by weights or layers says what one process says, over KV planes that look like its."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvcache.memory.device import DeviceKV
from serving import logs
from serving.expert_parallel.exchange import RankLost
from serving.model.hf_config import spec_from_hf
from serving.parallel.layout import ParallelLayout
from serving.rank_group import child
from serving.rank_group.child import RankProcess
from serving.rank_group.kv_share import kv_share
from serving.rank_group.layout_forward import LayoutForward
from serving.rank_group.layout_leader import DividedModel, join_layout, load_layout
from tests.fakes.awake import retaken
from tests.fakes.forks import no_fork
from tests.fakes.stopping import harm
from tests.serving.model.oracle import configs
from tests.serving.parallel.models import written
from tests.serving.rank_group.groups import (
    BLOCK,
    BLOCKS_EACH,
    DEADLINE,
    LENGTHS,
    Side,
    alone,
    exists,
    pids,
    wait_at_a_barrier,
)
from tests.tiny import tiny_llama

NEW_TOKENS = 6
MOST = range(len(LENGTHS))
SP2 = ParallelLayout(sequence=2)
TP2, PP2, TP2_PP2 = ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(tensor=2, pipeline=2)


@contextmanager
def divided_over(folder: Path, layout: ParallelLayout, deadline: float = DEADLINE) -> Iterator[DividedModel]:
    """The model at `folder`, one thread a rank; this process has as many threads afterwards as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(layout.tensor)
    try:
        divided = load_layout(folder, "float32", None, layout, deadline)
        try:
            yield divided
        finally:
            divided.ranks.close()
    finally:
        torch.set_num_threads(threads)


def device_kv(divided: DividedModel) -> DeviceKV:
    specs, blocks = divided.spec.kv_layers("float32"), BLOCKS_EACH * len(LENGTHS)
    return DeviceKV(specs, blocks, BLOCK, planes=divided.ranks.share_planes(specs, blocks, BLOCK))


def compare(folder: Path, layout: ParallelLayout) -> None:
    """Tokens of one process, its logits and hidden states but for the last bits, and its KV in whole planes.

    Then the last rank is lost, and named.
    """
    reference = alone(folder)
    with divided_over(folder, layout) as divided:
        kv = device_kv(divided)
        group, one = Side(join_layout(divided, kv.planes)), Side(reference)
        held, every = (sum(one.numel() for one in model.parameters()) for model in (divided.model, reference.model))
        assert held < 0.7 * every or layout == SP2
        for _ in range(NEW_TOKENS):
            close(group.step(MOST), one.step(MOST))
        assert group.layers == list(range(divided.spec.layers))
        assert group.tokens == one.tokens
        for layer, wanted in zip(kv.planes, reference.planes, strict=True):
            for plane, expected in zip(layer, wanted, strict=True):
                close(plane, expected)
        close(group.hidden(MOST), one.hidden(MOST))
        wait_at_a_barrier(group, one, close)
        assert divided.ranks.bytes_sent > 0
        assert divided.ranks.lost is None
        lose(divided, group, signal.SIGKILL)


def lose(divided: DividedModel, group: Side, how: signal.Signals) -> list[int]:
    """The step fails with the rank's name, and all later ones; no process stays. The layers it told of."""
    running = pids(divided)
    harm(running[-1], how)
    with pytest.raises(RankLost, match=f"rank {len(running)} of the group is lost") as lost:
        for _ in range(1000):
            group.step(MOST)
    assert lost.value.rank == len(running)
    told = group.layers
    with pytest.raises(RankLost, match=f"rank {len(running)}"):
        group.step(MOST)
    divided.ranks.close()
    assert not any(map(exists, running))
    return told


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "layout", [TP2, PP2, pytest.param(SP2, marks=pytest.mark.slow)], ids=["weights", "layers", "rows"]
)
def test_ranks_that_share_a_model_say_what_one_process_says(layout: ParallelLayout, tmp_path: Path) -> None:
    """Three key-value heads for two ranks, and three layers for two stages."""
    compare(tiny_llama(tmp_path, layers=3, hidden=48, heads=6, kv_heads=3), layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama3", TP2_PP2), ("deepseek_v2", TP2)],
    ids=["both", "latents"],
)
def test_ranks_of_any_family_say_what_one_process_says(name: str, layout: ParallelLayout, tmp_path: Path) -> None:
    compare(written(tmp_path, [name])[name], layout)


@pytest.mark.slow
def test_kv_of_a_narrower_type_lies_in_the_same_memory(tmp_path: Path) -> None:
    """As prompts for a decode worker with INT8 KV are computed: each rank quantizes its own heads."""
    folder = tiny_llama(tmp_path, heads=4, kv_heads=2)
    with divided_over(folder, TP2) as divided:
        kv = device_kv(divided)
        narrow = join_layout(divided, kv.planes).over(kv.kept_as("int8").planes)
        assert isinstance(narrow, LayoutForward)
        reference = alone(folder)
        wanted = DeviceKV(divided.spec.kv_layers("float32"), kv.num_blocks, BLOCK).kept_as("int8")
        group, one = Side(narrow), Side(reference.over(wanted.planes))
        close(group.step(MOST), one.step(MOST))
        for layer, expected in zip(narrow.planes, wanted.planes, strict=True):
            for plane, other in zip(layer, expected, strict=True):
                torch.testing.assert_close(plane, other, atol=1 if plane.dtype == torch.int8 else 1e-4, rtol=0)


@pytest.mark.slow
@retaken
def test_a_rank_that_stands_still_is_named_within_the_deadline(tmp_path: Path) -> None:
    with divided_over(tiny_llama(tmp_path), TP2, deadline=2.0) as divided:
        group = Side(join_layout(divided, device_kv(divided).planes))
        group.step(MOST)
        told = lose(divided, group, signal.SIGSTOP)
        assert told == [], "no layer counts as written before all ranks have written it"


@pytest.mark.parametrize("name", ["llama3", "deepseek_v2"])
@pytest.mark.parametrize("layout", [TP2, PP2, SP2, ParallelLayout(tensor=4), TP2_PP2], ids=str)
def test_shares_of_kv_cover_the_planes(name: str, layout: ParallelLayout) -> None:
    """Each layer's every head belongs to a rank that attends with it; a view of it has the rank's own shape."""
    spec = spec_from_hf(configs()[name].to_dict(), None)
    kv = DeviceKV(spec.kv_layers("float32"), 2, BLOCK)
    for rank in range(layout.ranks):
        share = kv_share(kv.planes, rank, spec, layout)
        for layer, own in zip(share, layout.kv_layers(spec, rank, "float32"), strict=True):
            assert [plane.shape[2:] for plane in layer] == [plane.shape for plane in own.planes]
            for plane in layer:
                plane.fill_(1.0)
    assert all(bool((plane == 1.0).all()) for layer in kv.planes for plane in layer)


def test_ranks_of_several_workers_are_told_apart_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """All write to one place where a front has several workers: a rank's lines name its worker too."""
    started: list[Mapping[str, str]] = []

    def begun(*_: object, env: Mapping[str, str], **__: object) -> SimpleNamespace:
        started.append(env)
        return SimpleNamespace(pid=1)

    def forked(module: str, arguments: object, environ: Mapping[str, str], files: object) -> SimpleNamespace:
        return begun(env=environ)

    monkeypatch.setattr(child._forks, "server", lambda environ: SimpleNamespace(start=forked))
    RankProcess(1).channel.close()
    monkeypatch.setattr(child._forks, "server", lambda environ: SimpleNamespace(start=no_fork))
    monkeypatch.setattr(subprocess, "Popen", begun)
    RankProcess(1).channel.close()
    for environ in started:
        assert json.loads(environ[logs.HANDED_DOWN])["name"] == f"{logs.current_setup().name}/rank-1"
    assert len(started) == 2
