"""Tensor-parallel layers on devices that do their work late: exchanges are in order, in graphs as well, no host waits,
and a rank that is lost is named.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, Work
from torch.distributed import HashStore

from serving.expert_parallel.all_to_all import AllToAllGroup
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.processes import ProcessWatch
from serving.expert_parallel.waits import BoundedWaits
from serving.parallel import collective, joining
from serving.parallel.collective import Collective
from serving.parallel.device_groups import StreamWaits
from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout
from serving.streams import IMMEDIATE, Event, recorded
from tests.gpu.fake_cuda import DEVICE, installed
from tests.gpu.fake_graphs import FakeGraph, GraphingCuda
from tests.gpu.fake_nccl import FakeNccl, FakeNcclRank

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

    def __init__(
        self, nccl: FakeNccl, rank: int, store: Store, deadline: float = 60.0, layout: ParallelLayout | None = None
    ) -> None:
        """`layout` has one form; None: the ranks share weights."""
        self.nccl, ranks = nccl.ranks[rank], len(nccl.ranks)
        layout = layout or ParallelLayout(tensor=ranks)
        waits = BoundedWaits(PrefixStore("waits", store), rank, ranks, ProcessWatch({}), deadline)
        self.collective = Collective(self.nccl, ranks, StreamWaits(waits, nccl.cuda), abort=self.nccl.abort)
        self.joined = ParallelRank(
            layout=layout,
            rank=rank,
            device=DEVICE,
            waits=waits,
            tensor=self.collective if layout.tensor > 1 else None,
            sequence=self.collective if layout.sequence > 1 else None,
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


class Place:
    """An event that the device passes so many seconds from when the first of them is looked at; None: never."""

    began: float | None = None

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def query(self) -> bool:
        Place.began = Place.began or time.monotonic()
        return self.seconds is not None and time.monotonic() - Place.began >= self.seconds


@pytest.mark.parametrize("stops", [None, 2])
def test_each_exchange_of_a_launched_step_has_the_deadline_for_itself(
    stops: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a step of many exchanges was given up where it took longer as a whole."""
    monkeypatch.setattr(Place, "began", None)
    rank = FakeRank(FakeNccl(GraphingCuda(), 2), 0, HashStore(), deadline=0.5)
    places = [Place(None if number == stops else 0.3 * number) for number in range(1, 6)]
    monkeypatch.setattr(StreamWaits, "passed", lambda _: iter(places[:-1]))
    if stops is None:
        rank.joined.finish(cast(Event, places[-1]))
        assert time.monotonic() - cast(float, Place.began) >= 1.5
    else:
        with pytest.raises(RankLost, match="deadline"):
            rank.joined.finish(cast(Event, places[-1]))
        assert time.monotonic() - cast(float, Place.began) < 1.5


def test_what_was_launched_is_passed_place_by_place_and_a_replay_as_one() -> None:
    cuda = GraphingCuda()
    with installed(cuda), torch.inference_mode():
        world = World(cuda, 2)
        groups = [rank.group.collective for rank in world.each]
        world.launch(lambda rank: rank.step()[0], world.rows[0])
        places = [list(group.passed()) for group in groups]
        assert [len(each) for each in places] == [LAYERS] * 2
        assert not any(place.query() for each in places for place in each)
        cuda.finish()
        assert all(place.query() for each in places for place in each)
        assert [list(group.passed()) for group in groups] == [[], []], "each is told once"
        for _ in range(50):
            world.launch(lambda rank: rank.step()[0], world.rows[0])
            cuda.finish()
        assert [len(list(group.passed())) for group in groups] == [LAYERS] * 2, "what is passed is not kept"
        first = world.each[0]
        with cuda.on(first.group.nccl.computing):
            cuda.captures().capture(first.step)[0].replay()
        assert not list(groups[0].passed())


def test_an_operation_of_an_aborted_group_tells_of_a_lost_rank() -> None:
    """What NCCL says of it is a RuntimeError, as what gloo says of a connection that broke."""

    class Aborted:
        def wait(self) -> bool:
            raise RuntimeError("NCCL communicator was aborted on rank 0. And advice")

    waits = StreamWaits(BoundedWaits(HashStore(), 0, 2, ProcessWatch({}), 60.0), IMMEDIATE)
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
        return Collective(group, ranks, StreamWaits(waits, self.nccl.cuda), abort=group.abort)


@pytest.mark.parametrize("first", ["hangs", "fails"])
def test_no_group_that_is_not_aborted_hides_a_lost_rank_or_keeps_the_others(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for graphs that were captured with a group, and frees one group while another holds the device."""
    over, aborted = threading.Event(), list[str]()

    def stuck() -> None:
        if first == "fails":
            raise RuntimeError("no such communicator")
        over.wait()

    monkeypatch.setattr(joining, "ABORT_SECONDS", 0.2)
    cuda = GraphingCuda()
    with installed(cuda):
        nccl = FakeNccl(cuda, 2)
        rank = FakeRank(nccl, 0, HashStore(), deadline=0.1)
        waits, group = StreamWaits(rank.joined.waits, cuda), nccl.ranks[0]
        tensor = Collective(group, 2, waits, abort=stuck)
        pipeline = Collective(group, 2, waits, abort=lambda: aborted.append("pipeline"))
        never = recorded(cuda)
        monkeypatch.setattr(type(never), "query", lambda _: False)
        with pytest.raises(RankLost, match="deadline"):
            dataclasses.replace(rank.joined, tensor=tensor, pipeline=pipeline).finish(never)
    assert aborted == ["pipeline"]
    over.set()


def test_a_closed_group_is_held_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end may take long: it comes in a thread that is let go."""

    class Group:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

        def abort(self) -> None: ...

    held: list[list[object]] = []
    monkeypatch.setattr(collective, "let_go", held.append)
    group = Group()
    one = Collective(cast(AllToAllGroup, group), 2, cast(StreamWaits, None), abort=group.abort)
    seen = weakref.ref(group)
    del group
    one.close()
    held.clear()
    gc.collect()
    assert seen() is None


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
