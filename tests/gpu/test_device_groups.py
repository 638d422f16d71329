"""Tensor-parallel layers on devices that do their work late: exchanges are in order, in graphs as well, no host waits,
and a rank that is lost is named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, Work
from torch.distributed import HashStore

from serving.batch.ragged import RaggedBatch
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.processes import ProcessWatch
from serving.expert_parallel.waits import BoundedWaits
from serving.forward.cuda_graphs import GraphSizes
from serving.model.decoder import Decoder
from serving.parallel import collective
from serving.parallel.applying import apply_parallel
from serving.parallel.collective import Collective
from serving.parallel.device_groups import StreamWaits
from serving.parallel.holding import hold_share
from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout
from serving.streams import recorded
from tests.gpu.fake_cuda import DEVICE, installed
from tests.gpu.fake_graphs import FakeGraph, GraphingCuda, counting_triton
from tests.gpu.fake_nccl import FakeNccl, FakeNcclRank
from tests.gpu.late_forward import device_pool

WIDTH, INNER, LAYERS, ROWS = 8, 12, 3, 5
ORDERS = st.builds(GraphingCuda, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.9]))


class Rank:
    """One rank: an MLP of whose inner width it has a share, its weights and the rows of a step on its device."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.group = FakeRank(world.nccl, rank, world.store, world.deadline)
        size = INNER // world.ranks
        held = slice(rank * size, (rank + 1) * size)
        self.weights = [(world.cuda.tensor(up[held]), world.cuda.tensor(down[:, held])) for up, down in world.layers]
        self.x = world.cuda.tensor(torch.zeros(ROWS, WIDTH))

    def step(self) -> tuple[Tensor]:
        x, group = self.x, self.group.collective
        for up, down in self.weights:
            x = x + group.sum(torch.relu(x @ up.T) @ down.T)
        return (x,)


class FakeRank:
    """What `ParallelRank.join` would make."""

    def __init__(self, nccl: FakeNccl, rank: int, store: Store, deadline: float = 60.0) -> None:
        self.nccl, ranks = nccl.ranks[rank], len(nccl.ranks)
        waits = BoundedWaits(PrefixStore("waits", store), rank, ranks, ProcessWatch({}), deadline)
        self.collective = Collective(self.nccl, ranks, StreamWaits(waits), abort=self.nccl.abort)
        self.joined = ParallelRank(
            layout=ParallelLayout(tensor=ranks),
            rank=rank,
            device=DEVICE,
            waits=waits,
            tensor=self.collective,
            sequence=None,
            pipeline=None,
            previous=None,
            following=None,
        )


class World:
    """All ranks, and what one process would compute."""

    def __init__(self, cuda: GraphingCuda, ranks: int, deadline: float = 60.0) -> None:
        self.cuda, self.ranks, self.deadline = cuda, ranks, deadline
        self.store, self.nccl = HashStore(), FakeNccl(cuda, ranks)
        generator = torch.Generator().manual_seed(ranks)
        self.layers = [
            (torch.randn(INNER, WIDTH, generator=generator), torch.randn(WIDTH, INNER, generator=generator) / INNER)
            for _ in range(LAYERS)
        ]
        self.rows = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(3)]
        self.each = [Rank(self, rank) for rank in range(ranks)]

    def expected(self, x: Tensor) -> Tensor:
        for up, down in self.layers:
            x = x + torch.relu(x @ up.T) @ down.T
        return x

    def launch(self, launch: Callable[[Rank], Tensor], x: Tensor) -> list[Tensor]:
        """What each rank's step gives, launched one rank after the other; none has waited for its device."""
        found, before = [], self.cuda.counts.copy()
        for rank in self.each:
            with self.cuda.on(rank.group.nccl.computing):
                rank.x.copy_(self.cuda.tensor(x))
                found.append(launch(rank))
        waits = {counted.what for counted in self.cuda.counts - before if counted.what.startswith("wait")}
        assert not waits
        return found

    def check(self, found: list[Tensor], x: Tensor) -> None:
        """Once the devices have come to the end: every rank has the bits of the others, near those of one process."""
        self.cuda.finish()
        outs = [self.cuda.peek(one) for one in found]
        assert all(torch.equal(out, outs[0]) for out in outs)
        torch.testing.assert_close(outs[0], self.expected(x))


@pytest.mark.parametrize(("ranks", "gathered"), [(2, 1 << 16), (3, 1 << 16), (3, 0)])
@given(cuda=ORDERS)
@settings(max_examples=8, deadline=None)
def test_layers_find_the_sums_of_all_ranks_and_no_host_waits(cuda: GraphingCuda, ranks: int, gathered: int) -> None:
    with installed(cuda), torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "GATHERED", gathered)
        world = World(cuda, ranks)
        for x in world.rows:
            world.check(world.launch(lambda rank: rank.step()[0], x), x)


@pytest.mark.parametrize("ranks", [2, 3])
@given(cuda=ORDERS)
@settings(max_examples=8, deadline=None)
def test_graphs_have_the_sums_in_them(cuda: GraphingCuda, ranks: int) -> None:
    """Captured once on each rank, and replayed with other rows: several steps launched before any is computed."""
    with installed(cuda), torch.inference_mode():
        world = World(cuda, ranks)
        world.check(world.launch(lambda rank: rank.step()[0], world.rows[0]), world.rows[0])  # it is warm
        graphs: dict[Rank, tuple[FakeGraph, tuple[Tensor]]] = {}
        launched = [rank.group.nccl.launched for rank in world.each]
        for rank in world.each:
            with cuda.on(rank.group.nccl.computing):
                graphs[rank] = cast(tuple[FakeGraph, tuple[Tensor]], cuda.captures().capture(rank.step))
        assert [rank.group.nccl.launched for rank in world.each] == launched, "capturing moves nothing"

        def replay(rank: Rank) -> Tensor:
            graph, (out,) = graphs[rank]
            graph.replay()
            return out.clone()

        steps = [(world.launch(replay, x), x) for x in world.rows]
        for found, x in steps:
            world.check(found, x)
        assert [rank.group.nccl.launched - launched[0] for rank in world.each] == [LAYERS * len(world.rows)] * ranks


@pytest.mark.parametrize("graph", [False, True])
def test_a_rank_that_launches_nothing_is_named_at_the_end_of_the_step(graph: bool) -> None:
    cuda = GraphingCuda(1, 0.5)
    with installed(cuda), torch.inference_mode():
        world = World(cuda, 2, deadline=0.3)
        first = world.each[0]
        with cuda.on(first.group.nccl.computing):
            if graph:
                cuda.captures().capture(first.step)[0].replay()
            else:
                first.step()
            with pytest.raises(RankLost) as lost:
                first.group.joined.finish(recorded(cuda))
        assert lost.value.rank == 1
        assert world.nccl.aborted
        cuda.finish()  # nothing waits for it any more
        with pytest.raises(RankLost) as again:
            first.step()
        assert again.value.rank == 1


def test_an_operation_of_an_aborted_group_tells_of_a_lost_rank() -> None:
    """What NCCL says of it is a RuntimeError, as what gloo says of a connection that broke."""

    class Aborted:
        def wait(self) -> bool:
            raise RuntimeError("NCCL communicator was aborted on rank 0. And advice")

    waits = StreamWaits(BoundedWaits(HashStore(), 0, 2, ProcessWatch({}), 60.0))
    with pytest.raises(RankLost, match="NCCL communicator was aborted on rank 0"):
        waits.finish(cast(Work, Aborted()))


def test_the_end_of_a_step_is_waited_for_by_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that has been passed costs a look, and one that is not yet is looked at until it is."""
    cuda = GraphingCuda()
    with installed(cuda), torch.inference_mode():
        world = World(cuda, 2)
        world.launch(lambda rank: rank.step()[0], world.rows[0])
        ends = []
        for rank in world.each:
            with cuda.on(rank.group.nccl.computing):
                ends.append(recorded(cuda))
        assert not ends[0].query()
        monkeypatch.setattr("serving.parallel.joining.time.sleep", lambda _: cuda.finish())
        for rank, end in zip(world.each, ends, strict=True):
            rank.group.joined.finish(end)
        assert not any(counted.what.startswith("wait") for counted in cuda.counts)


class Fakes:
    """Connects the ranks of one group by a FakeNccl (serving.parallel.joining.Connect)."""

    def __init__(self, cuda: GraphingCuda, ranks: int) -> None:
        self.nccl = FakeNccl(cuda, ranks)

    def __call__(self, store: Store, rank: int, ranks: int, waits: BoundedWaits) -> Collective:
        group = self.nccl.ranks[rank]
        return Collective(group, ranks, StreamWaits(waits), abort=group.abort)


def test_ranks_that_join_have_exchanged_before_any_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, layout, store = GraphingCuda(0, 0.5), ParallelLayout(tensor=2), HashStore()
    connect = Fakes(cuda, 2)
    monkeypatch.setattr("serving.parallel.joining.time.sleep", lambda _: cuda.finish())
    with installed(cuda), ThreadPoolExecutor(2) as threads:
        joining = [
            threads.submit(ParallelRank.join, layout, rank, store, deadline=60.0, device=DEVICE, connect=connect)
            for rank in range(2)
        ]
        ranks = [one.result(60) for one in joining]
    assert [rank.launched for rank in connect.nccl.ranks] == [1, 1]
    assert [(rank.rank, rank.tensor is not None, rank.groups) for rank in ranks] == [
        (number, True, [ranks[number].tensor]) for number in range(2)
    ]
    for rank in ranks:
        rank.close()


def test_a_rank_that_does_not_connect_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes its first exchange wait on the host for the others."""
    cuda, over = GraphingCuda(), threading.Event()

    def connecting(*_: object) -> None:
        over.wait()
        raise RuntimeError("the communicator was aborted")

    monkeypatch.setattr(FakeNcclRank, "alltoall_base", connecting)
    with installed(cuda):
        rank = FakeRank(FakeNccl(cuda, 2), 0, HashStore()).joined
        with pytest.raises(RankLost, match=r"no answer within 0\.1 s of NCCL"):
            rank.warm_up(0.1)
        with pytest.raises(RankLost, match="of NCCL"):
            rank.waits.check()
    over.set()


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
def test_a_decode_step_of_two_ranks_is_one_replay_with_its_sums_inside() -> None:
    """Of an 8B's 32 layers through the Triton path: two sums a layer, the embedding's, and the logits, no wait."""
    from serving.forward.triton_forward import TritonForward, supports
    from tests.gpu.triton_counts import SHAPE, SIZE, on_device

    cuda, store, layout = GraphingCuda(), HashStore(), ParallelLayout(tensor=2)
    nccl = FakeNccl(cuda, 2)
    with counting_triton(cuda), torch.inference_mode():
        forwards = []
        for rank in range(2):
            model = Decoder(SHAPE)
            hold_share(model, layout, rank)
            apply_parallel(on_device(model, cuda), FakeRank(nccl, rank, store).joined)
            planes = device_pool(cuda, model.spec.kv_layers("float32"), 8, SIZE).planes
            assert supports(model, "float32", planes[0]) is None
            with cuda.on(nccl.ranks[rank].computing):
                forwards.append(TritonForward(model, planes, 64))
                forwards[-1].warm_up(8, GraphSizes(sequences=(2,), contexts=(64,)))
        cuda.finish()
        before, launched = cuda.counts.copy(), [rank.launched for rank in nccl.ranks]
        for rank, forward in enumerate(forwards):
            with cuda.on(nccl.ranks[rank].computing):
                batch = RaggedBatch.build(
                    tokens=[[1], [2]], starts=[3, 17], block_tables=[[0], [1, 2]], block_size=SIZE, device=DEVICE
                )
                forward.greedy(batch, None)
        cuda.finish()
        counts = cuda.counts - before
    assert [rank.launched - first for rank, first in zip(nccl.ranks, launched, strict=True)] == [2 * 32 + 2] * 2
    assert sum(count for counted, count in counts.items() if counted.what == "replay") == 2
    assert not any(counted.what.startswith("wait") for counted in counts)
