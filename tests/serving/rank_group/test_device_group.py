"""Ranks that keep their heads' KV each on a device of its own say what one process says. The devices are CPUs here:
processes, words, KV and forward passes are the real ones, and exchanges go over gloo where NCCL would take them.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache.memory.device import DeviceKV
from kvcache.memory.ranked_kv import RankedKV
from serving.batch.layer_barrier import LayerBarrier
from serving.batch.ragged import RaggedBatch
from serving.config import EngineConfig
from serving.errors import WorkerLost
from serving.expert_parallel.exchange import RankLost
from serving.forward.forward import EagerForward
from serving.forward.layer_events import LayerDone
from serving.parallel.layout import ParallelLayout
from serving.rank_group import device_group
from serving.rank_group.device_forward import DeviceForward
from serving.rank_group.device_leader import ModelOnDevices, join_devices, load_on_devices
from serving.rank_group.device_messages import MakeForward, RankKV, RunOnDevice
from serving.rank_group.device_rank import compute
from serving.rank_group.layout_messages import LayoutDone
from serving.rank_group.layout_rank import connect
from serving.rank_group.share import LEADER
from tests.fakes.awake import retaken
from tests.fakes.stopping import harm, stop
from tests.serving.rank_group.groups import BLOCK, BLOCKS_EACH, DEADLINE, LENGTHS, Side, alone, exists
from tests.tiny import tiny_llama

CONFIG = EngineConfig(block_size=BLOCK, max_num_batched_tokens=64)
MOST = range(len(LENGTHS))
NEW_TOKENS = 4


@contextmanager
def on_devices(folder: Path, ranks: int = 2, deadline: float = DEADLINE) -> Iterator[ModelOnDevices]:
    """The model at `folder`, one thread a rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shared = load_on_devices(folder, "float32", ParallelLayout(tensor=ranks), deadline, "cpu")
        try:
            yield shared
        finally:
            shared.ranks.close()
    finally:
        torch.set_num_threads(threads)


def own_kv(shared: ModelOnDevices, blocks: int = BLOCKS_EACH * len(LENGTHS)) -> RankedKV:
    ranks, specs = shared.ranks, shared.spec.kv_layers("float32")
    return RankedKV(specs, blocks, BLOCK, "cpu", ranks=ranks.size, lanes=ranks.lanes)


def forward_over(shared: ModelOnDevices, kv: RankedKV) -> DeviceForward:
    return join_devices(shared, kv.planes, kv.keep, CONFIG, shared.spec.max_position)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def same_kv(kv: RankedKV, reference: EagerForward, one: Side) -> None:
    """What leaves, of all heads, is what one process keeps."""
    whole = DeviceKV(kv.specs, kv.num_blocks, BLOCK, planes=reference.planes)
    for number in MOST:
        slots = kv.slots(range(BLOCKS_EACH * number, BLOCKS_EACH * (number + 1)), 0, one.done[number])
        found, wanted = (pool.read_all(range(len(kv.specs)), slots) for pool in (kv, whole))
        for layer, expected in zip(found, wanted, strict=True):
            for plane, same in zip(layer, expected, strict=True):
                close(plane.view(torch.float32), same.view(torch.float32))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (4, 1)])
def test_ranks_with_kv_of_their_own_say_what_one_process_says(heads: int, kv_heads: int, tmp_path: Path) -> None:
    """Three key-value heads for two ranks, and one that both keep; then another cache, as after a rehearsal."""
    folder = tiny_llama(tmp_path, layers=3, hidden=8 * heads, heads=heads, kv_heads=kv_heads)
    reference = alone(folder)
    with on_devices(folder) as shared:
        forward_over(shared, own_kv(shared, 1))
        kv = own_kv(shared)
        forward = forward_over(shared, kv)
        group, one = Side(forward), Side(reference)
        for _ in range(NEW_TOKENS):
            close(group.step(MOST), one.step(MOST))
        assert group.tokens == one.tokens and group.layers == [0, 1, 2]
        close(group.hidden(MOST), one.hidden(MOST))
        same_kv(kv, reference, one)
        batch = one.batch(MOST)
        with torch.inference_mode():
            tokens, logits = forward.greedy_and_logits(batch, None, [1, 3])
            assert tokens.tolist() == forward.greedy(batch, None).tolist() == one.forward.greedy(batch, None).tolist()
            close(logits, one.forward.logits(batch, None)[[1, 3]])
        assert shared.ranks.bytes_sent > 0


def told_of_its_loss(shared: ModelOnDevices, how: signal.Signals) -> None:
    """The other rank is harmed between two steps: both that follow name it, and no process stays."""
    group = Side(forward_over(shared, own_kv(shared)))
    group.step(MOST)
    [running] = [other.process.pid for other in shared.ranks.others]
    harm(running, how)
    for _ in range(2):
        with pytest.raises(RankLost, match="rank 1 of the group is lost"):
            group.step(MOST)
    shared.ranks.close()
    assert not exists(running)


@retaken
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=str)
def test_a_lost_rank_is_named_and_no_process_stays(how: signal.Signals, tmp_path: Path) -> None:
    with on_devices(tiny_llama(tmp_path), deadline=2.0 if how is signal.SIGSTOP else DEADLINE) as shared:
        told_of_its_loss(shared, how)


@retaken
@pytest.mark.slow
async def test_a_rank_that_is_late_with_a_copy_ends_the_worker_though_no_step_runs(tmp_path: Path) -> None:
    """One that decodes begins no step once no KV can come: nobody else would find out."""
    with on_devices(tiny_llama(tmp_path), deadline=2.0) as shared:
        kv = own_kv(shared)
        forward_over(shared, kv)
        told = asyncio.Event()
        shared.ranks.watch(told.set)
        stop(shared.ranks.others[0].process.pid)
        with pytest.raises(WorkerLost, match="rank 1"):
            await asyncio.to_thread(kv.read, 0, kv.slots([0], 0, 4))
        await asyncio.wait_for(told.wait(), 60)
        shared.ranks.close()


@pytest.mark.parametrize("noticed", ["as it says so", "by an exchange"])
def test_a_rank_that_cannot_make_its_part_says_why(noticed: str, tmp_path: Path) -> None:
    with on_devices(tiny_llama(tmp_path)) as shared:

        def make() -> None:
            if noticed == "by an exchange":
                shared.ranks.others[0].process.wait(60)
                raise RankLost(1, "its connection is broken")

        kv = own_kv(shared)
        shared.ranks.meet(lambda store: connect(shared.model, shared.layout, LEADER, store, DEADLINE))
        order = MakeForward(keep=kv.keep(1), config=EngineConfig(block_size=BLOCK, kernels="compiled"), max_position=64)
        with pytest.raises(ValueError, match="rank 1: --kernels compiled: "):
            shared.ranks.make_forward({1: order}, make)


def test_a_model_that_is_not_there_is_told_of_before_ranks_wait(tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError)):
        load_on_devices(tmp_path / "none", "float32", ParallelLayout(tensor=2), DEADLINE, "cpu")


def test_each_rank_sees_the_gpu_of_its_number_and_what_libraries_are_told_by(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, dict[str, str]]] = []

    class Started:
        def __init__(self, rank: int, environ: dict[str, str], lanes: int) -> None:
            self.rank, self.process, self.channel = rank, self, self
            self.lanes = [self] * lanes
            made.append((rank, environ))

        def close(self) -> None: ...

        def end(self, until: float) -> None: ...

    monkeypatch.setattr(device_group, "RankProcess", Started)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-b,6")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("MILLRACE_API_KEY", "secret")
    group = device_group.GroupOnDevices(ParallelLayout(tensor=3), DEADLINE, "cuda", ["4", "GPU-b", "6"])
    assert [(rank, environ["CUDA_VISIBLE_DEVICES"]) for rank, environ in made] == [(1, "GPU-b"), (2, "6")]
    assert all(environ["NCCL_DEBUG"] == "WARN" and "MILLRACE_API_KEY" not in environ for _, environ in made)
    group.close()


class Finishing:
    """The leader's own rank (ParallelRank): its device comes to an end, or it has lost another."""

    device, bytes_sent = torch.device("cpu"), 3

    def __init__(self, told: list[object], lost: RankLost | None = None) -> None:
        self.told, self.lost = told, lost

    def finish(self, step: object) -> None:
        self.told.append("finished")
        if self.lost is not None:
            raise self.lost

    def abort(self) -> None:
        self.told.append("aborted")


class Computing:
    """A forward pass that says how it was asked."""

    form = "computing"

    def __init__(self, told: list[object]) -> None:
        self.told = told

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> torch.Tensor:
        self.told.append(("logits", layer_done is not None))
        return torch.zeros(1, 2)

    greedy = logits

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> torch.Tensor:
        self.told.append(("hidden", layer_done is not None))
        return torch.zeros(1, 2)


def leading(told: list[object], lost: RankLost | None = None) -> DeviceForward:
    """A leader of nobody else, and what it tells the others."""

    class Alone(device_group.GroupOnDevices):
        @contextmanager
        def computing(self, order: Callable[[int], object]) -> Iterator[list[LayoutDone]]:
            told.append(order(1))
            with super().computing(order) as done:
                yield done

    group = Alone(ParallelLayout(), DEADLINE, "cpu")
    group._own = Finishing(told, lost)  # type: ignore[assignment]
    return DeviceForward(Computing(told), group, SPEC)  # type: ignore[arg-type]


SPEC: Any = SimpleNamespace(layers=3, vocab_size=2, hidden=4)  # of a model
BATCH = RaggedBatch.build(tokens=[[1]], starts=[0], block_tables=[[0]], block_size=4)


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_all_ranks_replay_a_step_or_none_does(head: bool, tells: bool) -> None:
    """One that tells of its layers is launched: a graph would exchange other sizes with it."""
    told: list[object] = []
    forward = leading(told)
    layers: list[int] = []
    layer_done = layers.append if tells else None
    if head:
        forward.logits(BATCH, layer_done)
    else:
        forward.hidden(BATCH, layer_done)
    order, computed, finished = told
    assert isinstance(order, RunOnDevice) and (order.head, order.launched) == (head, tells)
    assert computed == ("logits" if head else "hidden", tells) and finished == "finished"
    followed: list[object] = []
    compute(Computing(followed), BATCH, head=order.head, launched=order.launched)  # type: ignore[arg-type]
    assert followed == [computed]


def test_a_layer_is_told_of_once_all_ranks_have_written_it() -> None:
    """The leader has done so sooner: the sum after a layer's attention is what it waits for the others in."""
    told: list[object] = []
    forward = leading(told)

    def logits(batch: RaggedBatch, layer_done: LayerDone | None) -> torch.Tensor:
        assert layer_done is not None
        for layer in range(SPEC.layers):
            told.append(f"the leader has written {layer}")
            layer_done(layer)
        return torch.zeros(1, 2)

    forward.own.logits = logits  # type: ignore[method-assign]
    forward.logits(BATCH, told.append)
    written = [f"the leader has written {layer}" for layer in range(3)]
    assert told[1:] == [written[0], written[1], 0, written[2], 1, "finished", 2]


@pytest.mark.parametrize("come", [True, False])
def test_a_step_behind_a_prefix_begins_once_all_of_it_has_come(come: bool) -> None:
    """Or on no rank: they would wait for each other in every layer."""
    told: list[object] = []
    forward, barrier = leading(told), LayerBarrier()
    barrier.open(3 if come else 2)
    barrier.hurry()
    behind = replace(BATCH, barrier=barrier)
    assert forward.logits(behind, None).shape == (1, 2)
    assert (told[:1] == []) is barrier.left is not come
    if not come:
        assert forward.greedy(behind, None).shape == (1,) and forward.hidden(behind, None).shape == (1, 4)
        tokens, logits = forward.greedy_and_logits(behind, None, [0])
        assert tokens.shape == (1,) and logits.shape == (1, 2) and not told


def test_a_lost_rank_is_told_of_before_tokens_are_read() -> None:
    """Who reads them waits for a device that waits for that rank."""
    told: list[object] = []
    forward = leading(told, RankLost(1, "gone"))
    for _ in range(2):
        with pytest.raises(RankLost, match="rank 1"):
            forward.greedy(BATCH, None)
    assert told[1:3] == [("logits", False), "finished"] and told.count("finished") == 1, "nor is it asked again"


def test_a_leader_that_fails_within_a_step_waits_for_nobody() -> None:
    """Its device may hold exchanges that the others never come to: the runner would wait for their end."""
    told: list[object] = []
    forward = leading(told)

    def out_of_memory(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    forward.own.logits = out_of_memory  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        forward.logits(BATCH, None)
    assert told[1:] == ["aborted"]
    with pytest.raises(RankLost, match="left a step unfinished"):
        forward.logits(BATCH, None)


def unkept(device: torch.device) -> RankKV:
    raise AssertionError("nobody is to keep anything")


def test_a_rank_that_ends_while_forward_passes_are_made_ends_what_the_device_waits_for() -> None:
    """A capture waits on the host for all that the device was given, and has no deadline."""
    aborted = threading.Event()

    class Own(Finishing):
        def abort(self) -> None:
            aborted.set()

    class Ended:
        rank, ending, owed = 1, False, 1

        def ask(self, word: object, seconds: float) -> None:
            self.ending = True

        def answer(self, kind: type, seconds: float) -> object:
            raise RankLost(1, "its process has ended")

    group = device_group.GroupOnDevices(ParallelLayout(), DEADLINE, "cpu")
    group._own = Own([])  # type: ignore[assignment]
    group.others = [Ended()]  # type: ignore[list-item]

    def captured() -> None:
        assert aborted.wait(20), "the device waits for ever"

    order = MakeForward(keep=unkept, config=CONFIG, max_position=8)
    with pytest.raises(RankLost, match="rank 1"):
        group.make_forward({1: order}, captured)
    assert group.lost is not None
    group.others = []
