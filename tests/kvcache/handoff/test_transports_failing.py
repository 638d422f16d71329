"""A transport that fails at any moment: everything comes all the same, over the stream."""

from __future__ import annotations

import asyncio

import pytest

from kvcache.handoff.chunk import sealed_commit
from kvcache.transfer.lent_memory import BUFFERS, TransferUnavailable
from kvcache.transfer.remote_write import BufferSender
from tests.fakes.sequences import lease_id
from tests.kvcache.handoff.test_transports import Taking, chunk
from tests.kvcache.reaching import BESIDE, way_to

COUNT = 2 * BUFFERS + 1


@pytest.mark.parametrize("kind", BESIDE)
@pytest.mark.parametrize("failing", range(COUNT), ids=lambda number: f"from {number}")
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
async def test_writes_that_fail_while_others_wait_for_a_buffer(
    monkeypatch: pytest.MonkeyPatch, kind: str, failing: int, late: bool
) -> None:
    """No buffer comes free any more: nobody may wait for one."""
    begun = 0
    write = BufferSender.write

    def fail(written: asyncio.Future[None]) -> None:
        written.set_exception(TransferUnavailable("the link is gone"))
        written.exception()

    def failing_write(self: BufferSender, buffer: int, payload: bytes | memoryview) -> asyncio.Future[None]:
        nonlocal begun
        begun += 1
        if begun <= failing:
            return write(self, buffer, payload)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if late:
            asyncio.get_running_loop().call_later(0.02, fail, written)
        else:
            fail(written)
        return written

    monkeypatch.setattr(BufferSender, "write", failing_write)
    taking = Taking()
    async with way_to(kind, taking) as way, asyncio.timeout(60):
        link = way.dial()
        await asyncio.gather(*(link.push(chunk(number)) for number in range(COUNT)))
        await link.commit(sealed_commit(lease_id(), 1))
        await link.close()
    assert sorted(each.first_layer for each in taking.chunks) == list(range(COUNT))
