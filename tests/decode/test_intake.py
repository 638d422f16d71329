"""A chunk is written without the engine's lock: its lease may end meanwhile, its blocks are nobody else's till then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from kvcache.handoff.chunk import encode
from kvcache.memory.kv_copies import HostCopies
from serving.errors import CorruptChunk, StaleLease
from serving.messages import LeaseId, Role
from tests.decode.workers import FINGERPRINT, SPECS, Worker
from tests.fakes.kv_layouts import random_pool
from tests.fakes.sequences import make_order

PROMPT = list(range(10))
SOURCE = random_pool(SPECS, 8, 4, 7)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker(Role.DECODE)
    yield made
    for session in list(made.decode.sessions.values()):
        await session.close()
    assert made.idle() and made.kv.unaccounted([]) == 0 and made.kv.kept == []


def meanwhile(worker: Worker, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Let this happen while bytes are written."""
    put = HostCopies.put

    def watched(self: HostCopies, *args: Any) -> None:
        assert not worker.engine.lock._is_owned()  # type: ignore[attr-defined]
        happens()
        put(self, *args)

    monkeypatch.setattr(HostCopies, "put", watched)


def chunk(fence: LeaseId, layers: Sequence[int] = (0, 1)) -> Any:
    return encode(SOURCE, fence, FINGERPRINT, range(layers[0], layers[-1] + 1), list(range(8)), 0, len(PROMPT))


async def test_a_lease_that_ends_while_a_chunk_is_written(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await worker.session()
    grant = await worker.lease(session, PROMPT)
    seq = worker.decode.table.check(grant.lease).seq
    blocks, held = list[int](), list[int]()

    def end() -> None:
        blocks.extend(seq.blocks)
        worker.decode.end("r/1")
        held.append(worker.kv.allocator.held)
        assert worker.kv.unaccounted([]) == 0, "what is kept is no leak"
        worker.loop._awake = False  # it has looked for room, and found none

    meanwhile(worker, monkeypatch, end)
    with pytest.raises(StaleLease):
        await worker.decode.receive(chunk(grant.lease))
    assert held == [len(blocks)] and worker.kv.allocator.held == 0
    assert worker.loop._awake, "others may wait for these blocks"


async def test_one_that_begins_anew_meanwhile_gets_other_blocks(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await worker.session()
    grant = await worker.lease(session, PROMPT)
    first = worker.decode.table.check(grant.lease).seq
    before, after = set[int](), set[int]()
    again = LeaseId(lease="r/1", epoch=grant.lease.epoch + 1, instance=grant.lease.instance)

    def begin_anew() -> None:
        before.update(first.blocks)
        worker.decode.advance(make_order(PROMPT, lease=again, request_id="r"), session.name)
        seq = worker.decode.table.check(again).seq
        worker.kv.settle(seq)
        after.update(seq.blocks)

    meanwhile(worker, monkeypatch, begin_anew)
    with pytest.raises(StaleLease):
        await worker.decode.receive(chunk(grant.lease))
    lease = worker.decode.table.check(again)
    assert len(before) == len(after) == 3 and not before & after
    assert lease.filled == [0, 0] and not lease.arriving


async def test_a_chunk_that_comes_twice_at_once_is_taken_once(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await worker.session()
    grant = await worker.lease(session, PROMPT)
    refused: list[CorruptChunk] = []

    def again() -> None:
        if not refused:
            with pytest.raises(CorruptChunk, match="out of order") as error:
                worker.decode._receive(chunk(grant.lease))
            refused.append(error.value)

    meanwhile(worker, monkeypatch, again)
    async with asyncio.timeout(60):
        await worker.decode.receive(chunk(grant.lease))
    assert len(refused) == 1 and worker.decode.table.check(grant.lease).filled == [10, 10]


async def test_a_write_that_fails_can_be_tried_again(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await worker.session()
    grant = await worker.lease(session, PROMPT)

    def fail() -> None:
        raise OSError("no device")

    with monkeypatch.context() as patch:
        meanwhile(worker, patch, fail)
        with pytest.raises(OSError, match="no device"):
            await worker.decode.receive(chunk(grant.lease))
    await worker.decode.receive(chunk(grant.lease))
    assert worker.decode.table.check(grant.lease).filled == [10, 10]
