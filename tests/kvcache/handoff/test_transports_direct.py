"""What a receiver brings itself, and what it asks for after all, reaches the sender over every transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvcache.handoff.chunk import Chunk, Commit, sealed, sealed_commit
from kvcache.handoff.grpc_stream import GrpcHandoff
from kvcache.handoff.local import LOCAL
from kvcache.transfer.lent_memory import MemoryLenders
from serving.errors import MillraceError, StaleLease
from serving.messages import LeaseId
from serving.rpc import Caller
from tests.fakes.sequences import lease_id
from tests.kvcache.reaching import TRANSPORTS, Way, way_to


class Bringing:
    """A receiver that has `start` tokens, and answers commits with `lacking` in turn."""

    def __init__(self) -> None:
        self.start = 32
        self.lacking: list[range | MillraceError] = [range(16, 32)]
        self.asked: list[LeaseId] = []
        self.took: list[tuple[int, int]] = []
        self.receiving = 0  # kept by the service
        self.lenders = MemoryLenders()

    async def begin(self, fence: LeaseId | None, generation: str) -> int:
        if fence is None:
            return 0
        self.asked.append(fence)
        return self.start

    async def receive(self, chunk: Chunk, via: str = LOCAL) -> None:
        self.took.append((chunk.start, chunk.end))

    async def commit(self, commit: Commit, via: str = LOCAL) -> range | None:
        answer = self.lacking.pop(0) if self.lacking else None
        if isinstance(answer, MillraceError):
            raise answer
        return answer


@pytest.fixture
def bringing() -> Bringing:
    return Bringing()


@pytest.fixture(params=TRANSPORTS)
async def way(request: pytest.FixtureRequest, bringing: Bringing) -> AsyncIterator[Way]:
    async with way_to(request.param, bringing) as made:
        yield made


def piece(start: int, end: int) -> Chunk:
    return sealed(
        Chunk(
            lease=lease_id(),
            layout="model",
            first_layer=0,
            last_layer=1,
            start=start,
            end=end,
            payload=b"kv",
            digest=b"",
        )
    )


async def test_a_handoff_leaves_out_what_is_brought_and_sends_what_lacks(way: Way, bringing: Bringing) -> None:
    link = way.dial()
    assert await link.begin() == 32 and bringing.asked == [lease_id()]
    await link.push(piece(32, 40))
    assert await link.commit(sealed_commit(lease_id(), 5)) == range(16, 32)
    await link.push(piece(16, 32))
    assert not await link.commit(sealed_commit(lease_id(), 5))
    await link.close()
    assert bringing.took == [(32, 40), (16, 32)] and len(bringing.asked) == 1


async def test_what_ends_a_handoff_is_heard_by_a_second_commit(way: Way, bringing: Bringing) -> None:
    bringing.lacking = [range(16, 32), StaleLease("over", code="epoch")]
    link = way.dial()
    assert await link.begin() == 32
    assert await link.commit(sealed_commit(lease_id(), 5)) == range(16, 32)
    with pytest.raises(StaleLease):
        await link.commit(sealed_commit(lease_id(), 5))
    await link.close()


@pytest.mark.parametrize("way", ["grpc"], indirect=True)
async def test_who_does_not_say_for_which_lease_hands_over_everything(way: Way, bringing: Bringing) -> None:
    caller = Caller(way.address)
    link = GrpcHandoff(caller)
    async with asyncio.timeout(60):
        assert await link.begin() == 0 and bringing.asked == []
    await link.close()
    await caller.close()
