"""KV that ranks keep by heads is whole to whoever copies it: the bytes are those of one pool, whatever the cut."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.handoff.chunk import encode, split, verify
from kvcache.memory import ranked_kv
from kvcache.memory.device import DeviceKV
from kvcache.memory.ranked_kv import CopyHeads, HeldHeads, RankedKV, kept_by
from serving.errors import WorkerLost
from serving.expert_parallel.exchange import RankLost
from serving.kvspec import LayerKV, gqa, gqa_int8, mla
from tests.fakes.kv_layouts import all_bytes, random_pool, same_parts
from tests.fakes.sequences import lease_id

LAYOUTS: dict[str, tuple[LayerKV, ...]] = {
    "an odd number of heads": (gqa(3, 4, "bfloat16"),) * 3,
    "fewer heads than ranks": (gqa(1, 4, "float32"),) * 2,
    "int8 and scales": (gqa_int8(4, 8),) * 2,
    "latents": (mla(6, 2, "bfloat16"),) * 3,
    "latents in int8": (mla(8, 4, "int8"),) * 2,
}
BLOCKS, SIZE = 6, 3


class Ranks:
    """Lanes to ranks of this process, whose words travel as they do between processes."""

    count = 2

    def __init__(self, ranks: int) -> None:
        self.ranks, self.held = ranks, dict[int, HeldHeads]()
        self.lost: RankLost | None = None
        self.asked: list[tuple[frozenset[int], CopyHeads]] = []
        self.number = 1

    @contextmanager
    def one(self) -> Iterator[Ranks]:
        yield self

    def together(self, ranks: Collection[int], word: object, own: Callable[[], object]) -> None:
        if self.lost is not None:
            raise self.lost
        assert isinstance(word, CopyHeads)
        self.asked.append((frozenset(ranks), word))
        own()
        for rank, held in self.held.items():
            if rank in ranks:
                held.does(pickle.loads(pickle.dumps(word)))


def ranked(specs: Sequence[LayerKV], size: int) -> tuple[RankedKV, Ranks]:
    ranks = Ranks(size)
    kv = RankedKV(specs, BLOCKS, SIZE, "cpu", ranks=size, lanes=ranks)
    keeps = {rank: pickle.loads(pickle.dumps(kv.keep(rank))) for rank in range(1, size)}
    ranks.held = {rank: keep(torch.device("cpu")) for rank, keep in keeps.items()}
    return kv, ranks


@pytest.mark.parametrize("lane_bytes", [4 << 20, 150])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_what_ranks_keep_is_copied_as_one_pool(name: str, size: int, lane_bytes: int, data: st.DataObject) -> None:
    """In one piece, and in many small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranked_kv, "LANE_BYTES", lane_bytes)
        whole, (kv, _) = random_pool(LAYOUTS[name], BLOCKS, SIZE, 1), ranked(LAYOUTS[name], size)
        every = range(len(whole.specs))
        everything = whole.slots(list(range(BLOCKS)), 0, BLOCKS * SIZE)
        kv.write_all(every, everything, whole.read_all(every, everything))
        start = data.draw(st.integers(0, 16))
        slots = whole.slots(data.draw(st.permutations(range(BLOCKS))), start, data.draw(st.integers(start + 1, 18)))
        first = data.draw(st.integers(0, len(whole.specs) - 1))
        layers = range(first, data.draw(st.integers(first + 1, len(whole.specs))))
        other = random_pool(whole.specs, BLOCKS, SIZE, 2).read_all(layers, slots)
        for pool in (whole, kv):
            pool.write_all(layers, slots, other)
        for span, at in ((layers, slots), (every, everything)):
            found, wanted = kv.read_all(span, at), whole.read_all(span, at)
            assert all(same_parts(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_keeps_its_heads_and_those_that_several_keep_alike(name: str, size: int) -> None:
    whole, (kv, ranks) = random_pool(LAYOUTS[name], BLOCKS, SIZE, 1), ranked(LAYOUTS[name], size)
    every, everything = range(len(whole.specs)), whole.slots(list(range(BLOCKS)), 0, BLOCKS * SIZE)
    kv.write_all(every, everything, whole.read_all(every, everything))
    heads = whole.specs[0].heads
    for rank in range(size):
        planes = kv.planes if rank == 0 else ranks.held[rank].planes
        assert [plane.shape[2:] for plane in planes[0]] == [
            plane.shape for plane in kept_by(rank, size, whole.specs)[0].planes
        ]
        first = 0 if heads is None else rank * heads // size
        for found, wanted in zip(planes, whole.planes, strict=True):
            for own, plane in zip(found, wanted, strict=True):
                part = plane if heads is None else plane[:, :, first : first + own.shape[2]]
                assert torch.equal(own.contiguous().view(torch.uint8), part.contiguous().view(torch.uint8))


def test_of_ranks_that_keep_the_same_one_sends(size: int = 3) -> None:
    kv, ranks = ranked(LAYOUTS["fewer heads than ranks"], size)
    slots = kv.slots([0, 1], 0, 5)
    kv.read_all(range(2), slots)
    kv.write_all(range(2), slots, [[np.zeros((5, 16), np.uint8)] * 2] * 2)
    assert [(asked, word.take) for asked, word in ranks.asked] == [({0}, True), ({0, 1, 2}, False)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_chunk_is_that_of_one_process(name: str) -> None:
    """Header, bytes and digest; and what one process has sent is taken."""
    whole, (kv, _) = random_pool(LAYOUTS[name], BLOCKS, SIZE, 1), ranked(LAYOUTS[name], 2)
    layers, blocks = range(len(whole.specs)), [3, 1, 5, 0, 2, 4]
    wanted = encode(whole, lease_id(), "layout", layers, blocks, 2, 13)
    verify(wanted, kv)
    kv.write_all(layers, kv.slots(blocks, 2, 13), split(wanted, kv))
    assert encode(kv, lease_id(), "layout", layers, blocks, 2, 13) == wanted
    assert not kv.in_host_memory, "whoever copies must not be the event loop"


def test_a_lost_rank_is_a_lost_worker_to_who_copies() -> None:
    """Which the other end, or the router, places again."""
    kv, ranks = ranked(LAYOUTS["latents"], 2)
    ranks.lost = RankLost(1, "its process has ended")
    with pytest.raises(WorkerLost, match="rank 1"):
        kv.read(0, kv.slots([0], 0, 2))


def test_memory_that_cannot_be_mapped_is_told_of() -> None:
    kv, _ = ranked(LAYOUTS["latents"], 2)
    keep = replace(kv.keep(1), segment=b"elsewhere")
    with pytest.raises(ValueError, match="KV cannot leave this rank"):
        keep(torch.device("cpu"))


def test_the_memory_between_ranks_goes_with_the_kv() -> None:
    def segments() -> int:
        found = 0
        for file in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the folder's own
                found += "millrace-ranks-kv" in str(file.readlink())
        return found

    gc.collect()
    before = segments()
    kv, ranks = ranked(LAYOUTS["latents"], 2)
    assert segments() > before
    del kv, ranks
    gc.collect()
    assert segments() == before


def test_a_pool_of_one_rank_is_a_pool() -> None:
    specs = LAYOUTS["an odd number of heads"]
    kv, _ = ranked(specs, 1)
    slots = kv.slots(list(range(BLOCKS)), 0, BLOCKS * SIZE)
    whole = random_pool(specs, BLOCKS, SIZE, 1)
    kv.write_all(range(3), slots, whole.read_all(range(3), slots))
    assert all_bytes(DeviceKV(specs, BLOCKS, SIZE, planes=kv.planes)) == all_bytes(whole)
