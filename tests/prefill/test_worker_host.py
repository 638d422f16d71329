"""A prefill worker with host memory: prompts longer than its device leave whole, and nothing stays of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvcache.blocks.offload import OffloadPlan
from kvcache.handoff import sender as handoffs
from kvcache.handoff.chunk import Chunk
from serving.errors import ContextLengthExceeded, CorruptChunk, MillraceError, StaleLease, WorkerLost
from serving.messages import FinishReason
from tests.prefill.scripted import next_token
from tests.prefill.test_worker import Prefill, order, results, until

PLAN = OffloadPlan(
    block_size=4, device_blocks=12, extent_blocks=2, extents=8, segment_extents=1
)  # 9 blocks of a sequence
PROMPT = [n % 5 for n in range(90)]


class LongPrefill(Prefill):
    """One with host memory."""

    def __init__(self) -> None:
        super().__init__(blocks=PLAN.device_blocks, host=PLAN)

    @property
    def extents(self) -> int:
        assert self.kv.host is not None
        return self.kv.host.extents.held


@pytest.fixture
async def worker() -> AsyncIterator[LongPrefill]:
    made = LongPrefill()
    made.start()
    yield made
    await made.loop.stop()
    assert made.idle() and made.kv.unaccounted([]) == 0
    assert made.kv.host is not None and made.kv.host.unaccounted([]) == 0


async def test_a_prompt_longer_than_the_device_leaves_whole(worker: LongPrefill) -> None:
    """With other prompts beside it, and though none of its KV leaves before most of it has moved to the host."""
    worker.link.gate.clear()
    running = asyncio.create_task(results(worker, order(PROMPT)))
    short = asyncio.create_task(results(worker, order([1, 2, 3], granted=False, max_tokens=1)))
    assert worker.kv.host is not None
    while worker.kv.host.tokens_moved < len(PROMPT) - 9 * 4:
        await asyncio.sleep(0)
    worker.link.gate.set()
    (prefilled,) = await running
    assert prefilled.delta.tokens == (next_token(PROMPT),) and len(worker.link.committed) == 1
    for layer in range(2):
        spans = [(c.start, c.end) for c in worker.link.chunks if c.first_layer <= layer < c.last_layer]
        assert [p for start, end in spans for p in range(start, end)] == list(range(len(PROMPT)))
    assert (await short)[0].delta.finish is FinishReason.LENGTH
    await asyncio.to_thread(until, worker.idle)


async def test_its_kv_is_held_until_the_last_of_it_has_left(worker: LongPrefill) -> None:
    worker.link.gate.clear()
    async for prefilled in worker.prefill.run(order(PROMPT)):
        assert prefilled.delta.finish is None and worker.extents > 0
        worker.link.gate.set()
    assert len(worker.link.committed) == 1 and worker.extents == 0


@pytest.mark.parametrize("error", [CorruptChunk("harmed"), StaleLease("over"), WorkerLost("gone")])
@pytest.mark.parametrize("after", [0, 60])
async def test_a_handoff_that_breaks_frees_both_memories(
    worker: LongPrefill, error: MillraceError, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoffs, "CHUNK_BYTES", 128)

    def refuse(chunk: Chunk) -> None:
        if chunk.end > after:
            raise error

    worker.link.before_push = refuse
    with pytest.raises(StaleLease if isinstance(error, WorkerLost) else type(error)):
        await results(worker, order(PROMPT))
    assert worker.link.committed == [] and worker.link.closed == 1
    await asyncio.to_thread(until, worker.idle)


async def test_leaving_in_the_middle_frees_both_memories(worker: LongPrefill) -> None:
    worker.link.gate.clear()
    running = asyncio.create_task(results(worker, order(PROMPT)))
    while not worker.extents:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert worker.link.committed == [] and worker.link.closed == 1
    await asyncio.to_thread(until, worker.idle)


async def test_what_fits_neither_memory_is_refused(worker: LongPrefill) -> None:
    with pytest.raises(ContextLengthExceeded, match=str(PLAN.tokens)):
        await results(worker, order([0] * PLAN.tokens))
