"""What is particular to a node behind gRPC: the key, broken calls, deadlines; and messages that keep every field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.pool import wire
from kvcache.pool.block import PoolBlock, Slab
from kvcache.pool.links import BlockEntry, BlockSelection, PoolEvent
from kvcache.pool.remote import RemoteNode
from kvcache.pool.wire import put_framing, slab_framing
from kvcache.transfer.lent_memory import LentBuffers
from serving.errors import Unauthorized, WorkerLost
from serving.messages import NamespaceStat, PoolReport, PoolStat, Tier, TierStat
from serving.proto import pool_pb2 as pb
from serving.wire import from_pb, to_pb
from tests.fakes.refused_early import refusing_early
from tests.kvcache.pool.nodes import KEY, Served, block, key


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = await Served("grpc").start()
    yield made
    await made.stop()


async def every_call(link: RemoteNode, error: type[Exception]) -> None:
    """All of them fail like this."""
    calls = [link.put([block(1)]), link.lookup([key(1)]), link.evict(BlockSelection()), link.report(), link.verify()]
    for call in calls:
        with pytest.raises(error):
            await call
    for stream in (link.get([key(1)], 0, 0), link.entries(BlockSelection()), link.events()):
        with pytest.raises(error):
            [one async for one in stream]


@pytest.mark.parametrize("wrong", [None, "wrong"])
async def test_without_the_key_no_door_opens(served: Served, wrong: str | None) -> None:
    stranger = RemoteNode(served.address, wrong)
    await every_call(stranger, Unauthorized)
    await stranger.close()
    assert served.store.stored == 0


async def test_a_stranger_hears_that_he_is_one_though_the_stream_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with refusing_early(monkeypatch) as server:
        stranger = RemoteNode(server.address, "wrong")
        with pytest.raises(Unauthorized):
            [one async for one in stranger.get([key(1)], 0, 0)]
        await stranger.close()
        assert server.hidden


async def test_nobody_there_is_a_lost_node(served: Served) -> None:
    await served.kill()
    link = RemoteNode(served.address, KEY)
    await every_call(link, WorkerLost)
    await link.close()


async def test_an_answer_that_takes_too_long_is_a_lost_node(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(keys: object, pin_seconds: float) -> list[bool]:
        assert served.store.gate.wait(10)
        return []

    monkeypatch.setattr(served.store, "lookup", stuck)
    link = RemoteNode(served.address, KEY, 0.05)
    with pytest.raises(WorkerLost) as lost:
        await link.lookup([key(1)])
    assert lost.value.code == "DEADLINE_EXCEEDED"
    await link.close()


async def test_a_node_that_dies_under_a_get_is_lost_after_what_it_sent(served: Served) -> None:
    await served.link.put([block(1)])
    served.store.after = 2
    parts = []
    with pytest.raises(WorkerLost):
        async for slab in served.link.get([key(1)], 0, 0):
            parts.append(slab.part)
            if slab.part == 1:
                await served.kill()
    assert parts == [0, 1]


async def test_a_long_put_is_stored_a_batch_at_a_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PUT_BYTES", 12_000)
    put, batches = served.store.put, []

    def counting(blocks: Sequence[PoolBlock]) -> int:
        batches.append(len(blocks))
        return put(blocks)

    monkeypatch.setattr(served.store, "put", counting)
    assert await served.link.put([block(number) for number in range(8)]) == 8
    assert batches == [3, 3, 2]


async def test_leaving_a_get_tells_the_node(served: Served) -> None:
    await served.link.put([block(number, size=1 << 20) for number in range(3)])
    stream = served.link.get([key(number) for number in range(3)], 0, 0)
    await anext(aiter(stream))
    assert isinstance(stream, AsyncIterator)
    await stream.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        while served.node.calls:
            await asyncio.sleep(0.001)


# ---- messages ------------------------------------------------------------------------------------------------------

COUNT = st.integers(0, 2**40)
SECONDS = st.floats(0, 1e9)
KEYS = st.binary(min_size=32, max_size=32)
SIZES = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)
NAME = st.text(max_size=8)
TIERS = st.builds(
    TierStat,
    **{name: COUNT for name in TierStat.__slots__ if not name.endswith("seconds")},
    read_seconds=SECONDS,
    eviction_age_seconds=SECONDS,
)
STATS = st.builds(
    PoolStat,
    tiers=st.dictionaries(st.sampled_from(Tier), TIERS),
    namespaces=st.dictionaries(NAME, st.builds(NamespaceStat, bytes=COUNT, blocks=COUNT, quota=COUNT), max_size=3),
    name=NAME,
    instance=NAME,
    **dict.fromkeys(("lookups", "found", "stored", "refused", "pinned", "backlog"), COUNT),
)


@given(st.builds(PoolReport, stat=STATS, address=NAME, draining=st.booleans()))
def test_a_report_comes_out_as_it_went_in(report: PoolReport) -> None:
    assert from_pb(to_pb(report, pb.PoolStat), PoolReport) == report


def test_a_tier_of_a_newer_node_is_left_out() -> None:
    stat = PoolStat(
        name="n", instance="i", tiers={}, namespaces={}, lookups=0, found=0, stored=0, refused=0, pinned=0, backlog=0
    )
    message = to_pb(PoolReport(stat=stat, address="a"), pb.PoolStat)
    message.tiers.add(tier="tape")
    assert from_pb(message, PoolReport).stat.tiers == {}


@given(
    st.lists(st.tuples(KEYS, NAME, st.lists(st.integers(0, 9)), st.binary()), max_size=3),
    st.builds(Slab, part=st.integers(0, 99), indices=SIZES, sizes=SIZES, digests=st.binary(), payload=st.binary()),
    st.builds(BlockSelection, namespace=st.none() | NAME, keys=st.lists(KEYS, max_size=3).map(tuple)),
    st.builds(
        BlockEntry,
        key=KEYS,
        namespace=NAME,
        bytes=COUNT,
        tiers=st.lists(st.sampled_from(Tier), unique=True).map(tuple),
        age_seconds=SECONDS,
        pinned=st.booleans(),
    ),
    st.builds(
        PoolEvent,
        kind=st.sampled_from(["stored", "evicted", "cleared"]),
        keys=st.lists(KEYS, max_size=3).map(tuple),
        sequence=COUNT,
    ),
)
def test_every_field_crosses_the_wire(
    stored: list[tuple[bytes, str, list[int], bytes]],
    slab: Slab,
    what: BlockSelection,
    entry: BlockEntry,
    event: PoolEvent,
) -> None:
    blocks = [
        PoolBlock(key=k, namespace=name, sizes=tuple(sizes), digests=digests, payload=bytes(range(sum(sizes) % 256)))
        for k, name, sizes, digests in stored
        if sum(sizes) < 256
    ]
    assert wire.blocks_of(put_framing.decode(put_framing.encode(wire.put_frame(blocks, LentBuffers())))) == blocks
    frame = slab_framing.decode(slab_framing.encode(wire.slab_frame(slab)))
    assert wire.slab_of(frame.message, frame.payload, slab.via) == slab
    assert from_pb(to_pb(what, pb.Selection), BlockSelection) == what
    assert from_pb(to_pb(entry, pb.PoolEntry), BlockEntry) == entry
    assert from_pb(to_pb(event, pb.PoolEvent), PoolEvent) == event
