"""Slabs that come in lent memory: all of them, as they were; and what happens when they cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvcache.pool.block import Slab
from kvcache.pool.reading import SLAB_BYTES
from kvcache.pool.remote import RemoteNode
from kvcache.transfer.choice import lenders_on_demand
from kvcache.transfer.lent_memory import BUFFERS, LentBuffers, MemoryLender, MemoryLenders, TransferUnavailable
from kvcache.transfer.remote_write import BufferSender
from kvcache.transfer.shared_memory import SharedMemoryLender
from serving.errors import InvalidRequest
from tests.kvcache.pool.nodes import KEY, PARTS, Served, block, content, key, patient_client
from tests.kvcache.reaching import BESIDE

COUNT = 3 * BUFFERS  # blocks with parts of half a slab: more slabs than there are buffers
SIZE = SLAB_BYTES // 2 + 1


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = await Served("shm", ram_bytes=COUNT * PARTS * SIZE * 2).start()
    await made.link.put([block(number, size=SIZE) for number in range(COUNT)])
    yield made
    await made.stop()


async def fetched(link: RemoteNode) -> list[Slab]:
    return [slab async for slab in link.get([key(number) for number in range(COUNT)], 0, 0)]


def right(slabs: list[Slab]) -> bool:
    """Every part of every block, once, and as it was put."""
    found = [(index, slab.part, bytes(data)) for slab in slabs for index, _, data in slab.parts()]
    return sorted(found) == sorted((n, part, content(n, part, SIZE)) for n in range(COUNT) for part in range(PARTS))


def lendable(lenders: MemoryLenders, kind: str = "shm") -> int:
    """How many gets could be lent buffers now, less those that there are."""
    lender = lenders.of(kind)
    assert isinstance(lender, SharedMemoryLender)
    parts = lender.lending.parts
    found = [lent for _ in range(parts) if (lent := lender.lend())]
    for lent in found:
        lent.give_back(settled=True)
    return len(found) - parts


@pytest.mark.parametrize("kind", BESIDE)
async def test_more_slabs_than_buffers_all_come_that_way(served: Served, kind: str) -> None:
    lenders = lenders_on_demand(kind)
    link = RemoteNode(served.address, KEY, lenders=lenders)
    for _ in range(2):
        slabs = await fetched(link)
        assert right(slabs) and {slab.via for slab in slabs} == {kind}
    await link.close()
    lenders.close()


async def test_where_one_way_leads_nowhere_the_next_is_taken(served: Served) -> None:
    """As between two hosts: the first get finds out, and comes along with its messages."""

    class Elsewhere(SharedMemoryLender):
        kind = "elsewhere"

        def __init__(self) -> None:
            super().__init__()
            self.offer = replace(self.offer, details=bytes(len(self.offer.details)))

    lenders = MemoryLenders({"elsewhere": Elsewhere, "shm": SharedMemoryLender})
    link = RemoteNode(served.address, KEY, lenders=lenders)
    ways = []
    for _ in range(3):
        slabs = await fetched(link)
        assert right(slabs)
        ways.append({slab.via for slab in slabs})
    assert ways == [{"grpc"}, {"shm"}, {"shm"}]
    await link.close()
    lenders.close()


async def test_what_cannot_be_lent_is_done_without(served: Served) -> None:
    def broken() -> MemoryLender:
        raise TransferUnavailable("no memory")

    lenders = MemoryLenders({"shm": broken})
    link = RemoteNode(served.address, KEY, lenders=lenders)
    slabs = await fetched(link)
    assert right(slabs) and {slab.via for slab in slabs} == {"grpc"}
    await link.close()
    lenders.close()


async def test_more_gets_than_there_are_buffers_for(served: Served) -> None:
    """The rest come along with their messages, and what was lent comes back."""
    link = served.link
    assert isinstance(link, RemoteNode)
    for _ in range(2):
        gets = [link.get([key(number)], 0, 0) for number in [*range(COUNT), *range(8)]]
        firsts = [await anext(aiter(get)) for get in gets]
        ways = [{first.via, *[slab.via async for slab in get]} for first, get in zip(firsts, gets, strict=True)]
        assert ways.count({"shm"}) == 16 and ways.count({"grpc"}) == 4
    assert lendable(served.lenders) == 0


async def test_the_buffers_of_a_get_left_early_rest(served: Served) -> None:
    """Its node may still be writing."""
    link = served.link
    assert isinstance(link, RemoteNode)
    get = link.get([key(number) for number in range(COUNT)], 0, 0)
    await anext(aiter(get))
    await get.aclose()  # type: ignore[attr-defined]
    assert lendable(served.lenders) == -1
    async with asyncio.timeout(60):
        while served.node.calls:
            await asyncio.sleep(0.001)
    assert right(await fetched(link))


async def test_a_slab_overwritten_in_its_buffer_is_found_by_its_digests(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = patient_client(lambda address: RemoteNode(address, KEY, lenders=served.lenders))
    client.set_nodes([served.address])
    read = LentBuffers.read

    def late(lent: LentBuffers, index: int, length: int) -> bytes | memoryview:
        assert isinstance(lent.lender, SharedMemoryLender)
        lent.lender.segment.memory[lent.addresses[index] + 5] ^= 1
        return read(lent, index, length)

    monkeypatch.setattr(LentBuffers, "read", late)
    keys = [key(number) for number in range(COUNT)]
    slabs = [slab async for slab in client.get(keys, parts=PARTS)]
    found = {(index, slab.part): bytes(data) for slab in slabs for index, _, data in slab.parts()}
    assert all(data == content(*place, SIZE) for place, data in found.items())
    assert client.stats.corrupt > 0 and len(found) < COUNT * PARTS
    await client.close()


async def test_only_what_was_lent_is_freed() -> None:
    buffers = BufferSender(None, "asker")
    await buffers.lent([4096, 8192], 1)
    buffers.freed(1)
    with pytest.raises(InvalidRequest):
        buffers.freed(2)
