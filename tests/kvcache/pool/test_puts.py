"""Blocks a node reads out of memory its client left them in: all as they were, and what happens when it cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from kvcache.pool import remote, wire
from kvcache.pool.block import PoolBlock
from kvcache.pool.remote import RemoteNode
from kvcache.pool.wire import PutFrame, blocks_of, put_frame
from kvcache.transfer.framing import Frame
from kvcache.transfer.lent_memory import TRANSFER_BYTES, LentBuffers, TransferUnavailable
from kvcache.transfer.shared_memory import Segment, SharedMemoryLender
from serving.errors import CorruptChunk, InvalidRequest
from tests.kvcache.pool.nodes import PARTS, Served, block, content, key
from tests.kvcache.pool.test_gets import lendable

SIZE = 100_000


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = await Served("shm", ram_bytes=256 << 20).start()
    yield made
    await made.stop()


@pytest.fixture
def along(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every put that leaves, whether its bytes go along with the message."""
    seen: list[bool] = []

    def seeing(blocks: Sequence[PoolBlock], lent: LentBuffers) -> PutFrame:
        made = put_frame(blocks, lent)
        seen.append(bool(made.parts))
        return made

    monkeypatch.setattr(remote, "put_frame", seeing)
    return seen


async def right(link: RemoteNode, count: int, size: int = SIZE) -> bool:
    found = {}
    async for slab in link.get([key(number) for number in range(count)], 0, 0):
        found |= {(index, slab.part): bytes(data) for index, _, data in slab.parts()}
    return found == {(n, part): content(n, part, size) for n in range(count) for part in range(PARTS)}


async def test_blocks_are_read_where_they_lie(along: list[bool], served: Served) -> None:
    link = served.link
    assert isinstance(link, RemoteNode)
    for first in (0, 5):
        assert await link.put([block(number, size=SIZE) for number in range(first, first + 5)]) == 5
    assert along == [False] * 2 and await right(link, 10)
    assert lendable(served.lenders) == 0


async def test_what_is_larger_than_the_room_goes_along(along: list[bool], served: Served) -> None:
    link = served.link
    assert isinstance(link, RemoteNode)
    size = TRANSFER_BYTES // PARTS + 1
    assert await link.put([block(0, size=size)]) == 1
    assert along == [True] and await right(link, 1, size)


async def test_a_node_that_cannot_read_it_is_told_the_bytes(
    along: list[bool], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one on another host: it is found out once."""

    def elsewhere(details: bytes) -> None:
        raise TransferUnavailable("another host")

    monkeypatch.setattr(wire, "mapped", elsewhere)
    link = served.link
    assert isinstance(link, RemoteNode)
    for first in (0, 2):
        assert await link.put([block(number, size=SIZE) for number in range(first, first + 2)]) == 2
    assert along == [False, True, True]
    assert await right(link, 4) and lendable(served.lenders) == -1, "what was not taken rests a while"


async def test_bytes_that_change_before_they_are_read_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def harmed(blocks: Sequence[PoolBlock], lent: LentBuffers) -> PutFrame:
        made = put_frame(blocks, lent)
        assert isinstance(lent.lender, SharedMemoryLender)
        lent.lender.segment.memory[made.message.address + 7] ^= 1
        return made

    monkeypatch.setattr(remote, "put_frame", harmed)
    with pytest.raises(CorruptChunk):
        await served.link.put([block(0, size=SIZE)])
    assert served.store.stored == 0 and served.store.refused == 1


@pytest.mark.parametrize("harm", ["nothing offered", "beyond its end", "far beyond", "nonsense"])
def test_only_what_was_offered_is_read(harm: str) -> None:
    segment = Segment(1 << 16)
    message = put_frame([block(0)], LentBuffers()).message
    message.address, message.memory = 4096, segment.details
    assert blocks_of(Frame(message)) == [replace(block(0), payload=bytes(4000))]
    if harm == "nothing offered":
        message.memory = b""
    elif harm == "nonsense":
        message.memory = b"nonsense"
    else:
        message.address = len(segment.memory) - 3999 if harm == "beyond its end" else (1 << 64) - 1
    with pytest.raises(InvalidRequest) as raised:
        blocks_of(Frame(message))
    assert raised.value.param == wire.UNREADABLE
    segment.close()


def test_blocks_that_do_not_add_up_are_corrupt() -> None:
    frame = put_frame([block(0), block(1)], LentBuffers())
    with pytest.raises(CorruptChunk):
        blocks_of(replace(frame, parts=frame.parts[:1]))
