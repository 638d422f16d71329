"""Leases whose first KV comes from the pool: what is handed over beside it, after all, too early, and in vain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode.direct import DirectLeases
from decode.leases import LeaseState
from decode.worker import RouterSession
from kvcache.connector.block_io import read_blocks
from kvcache.connector.direct_fetch import DirectFetcher
from kvcache.connector.fetch_cost import DirectCost, FetchCost
from kvcache.handoff.chunk import Chunk, encode, sealed_commit
from kvcache.pool.block import PoolBlock
from serving.errors import CorruptChunk, StaleLease
from serving.messages import LeaseId, Role
from serving.tracing import NoTracer, TraceContext, call_headers, use
from tests.decode.workers import FINGERPRINT, SPECS, Worker
from tests.fakes.kv_layouts import random_pool, token_at
from tests.fakes.sequences import make_order, make_sequence
from tests.kvcache.connector.test_direct_fetch import Stopping

PROMPT = list(range(14))  # three blocks and two tokens
SOURCE = random_pool(SPECS, 8, 4, 7)
WHOLE = 12
CALLS = "00-0af7651916cd43dd8448eb211c80319c-00000000000000ff-01"
TRACE = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


class Direct(Worker):
    """A decode worker, and a pool that has the prompt's blocks as SOURCE holds them."""

    def __init__(self, role: Role = Role.DECODE) -> None:
        super().__init__(role)
        self.reader = Stopping(self.pooled())
        locations, cost = self.worker.context.locations, DirectCost(FetchCost())
        self.prefixes = DirectFetcher(self.reader, self.kv, locations, cost, wait=600, always=True)
        self.decode.direct = DirectLeases(self.decode.table, self.engine.lock, self.prefixes, "decode-0")

    def pooled(self) -> dict[bytes, PoolBlock]:
        seq = make_sequence(self.kv, PROMPT)
        keys = self.kv.shareable_keys(seq)
        return {block.key: block for block in read_blocks(SOURCE, range(len(keys)), keys, "default")}

    async def stalled(self, fence: LeaseId, slabs: int = 1) -> int:
        """Begin, and wait until so many slabs have come and the next does not."""
        self.reader.after = self.reader.sent + slabs
        wanted = self.reader.after
        start = await self.decode.direct.begin(fence)
        async with asyncio.timeout(60):
            while self.reader.sent < wanted:
                await asyncio.sleep(0)
        return start

    def holds(self, fence: LeaseId, upto: int = len(PROMPT)) -> bool:
        """Whether the lease's first tokens are SOURCE's, in every layer."""
        blocks = self.decode.table.check(fence).seq.blocks
        return all(
            token_at(self.device_kv, layer, blocks, position) == token_at(SOURCE, layer, list(range(8)), position)
            for layer in range(len(SPECS))
            for position in range(upto)
        )

    def runs(self, fence: LeaseId) -> bool:
        return self.decode.table.check(fence).state is LeaseState.RUNNING


@pytest.fixture
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[Direct]:
    made = Direct(getattr(request, "param", Role.DECODE))
    yield made
    for session in list(made.decode.sessions.values()):
        await session.close()
    assert made.idle() and made.kv.unaccounted([]) == 0
    for _ in range(5):
        await asyncio.sleep(0)
    assert made.decode.direct.running == 0, "a lease that ends takes its fetch with it, though the pool stalls"


@pytest.fixture
async def session(worker: Direct) -> RouterSession:
    return await worker.session()


def chunk(fence: LeaseId, start: int, end: int) -> Chunk:
    return encode(SOURCE, fence, FINGERPRINT, range(2), list(range(8)), start, end)


async def test_the_pool_and_the_handoff_fill_a_lease_together(worker: Direct, session: RouterSession) -> None:
    grant = await worker.lease(session, PROMPT)
    assert grant.cached_tokens == 0 and await worker.decode.direct.begin(grant.lease) == WHOLE
    await worker.decode.receive(chunk(grant.lease, WHOLE, 14))
    assert await worker.decode.commit(sealed_commit(grant.lease, 1)) is None
    assert worker.runs(grant.lease) and worker.holds(grant.lease)
    another = await worker.lease(session, PROMPT, "r/2")
    assert another.cached_tokens == WHOLE and await worker.decode.direct.begin(another.lease) == 0, (
        "nothing is left to bring"
    )


class Recorder:
    """A tracer whose spans are in `told` once they have ended; `open` are those that have not."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any], str]] = []
        self.open = 0

    def now(self) -> int:
        return 0

    def begin(self, name: str, parent: TraceContext, began: int, *, serves: bool = False) -> Any:
        assert parent == TRACE
        self.open += 1

        def end(attributes: Mapping[str, Any], error: str = "") -> None:
            self.open -= 1
            self.told.append((name, dict(attributes), error))

        return SimpleNamespace(context=TraceContext(CALLS), end=end)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    use(made)
    yield made
    use(NoTracer())


async def test_a_direct_fetch_is_a_span_and_calls_to_the_pool_are_its_children(
    worker: Direct, session: RouterSession, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[tuple[str, str], ...]] = []
    lookup = worker.reader.lookup

    async def noting(keys: Sequence[bytes], pin_seconds: float = 0.0) -> int:
        asked.append(call_headers())
        return await lookup(keys, pin_seconds)

    monkeypatch.setattr(worker.reader, "lookup", noting)

    async def begun(name: str) -> LeaseId:
        grant = await worker.lease(session, PROMPT, name)
        seq = worker.decode.table.check(grant.lease).seq
        seq.request = replace(seq.request, trace=TRACE)
        await worker.decode.begin(grant.lease, worker.decode.identity.generation)
        return grant.lease

    async def told() -> tuple[str, dict[str, Any], str]:
        async with asyncio.timeout(60):
            while not recorder.told:
                await asyncio.sleep(0)
        return recorder.told.pop()

    about = {"millrace.worker": "decode-0"}
    worker.reader.after = 1
    stalled = await begun("r/1")
    await asyncio.sleep(0)
    assert recorder.open == 1, "it lasts until nothing more comes"
    session.cancel(stalled.lease)
    assert await told() == ("millrace.fetch", {**about, "millrace.fetched_tokens": 0}, "cancelled")
    worker.reader.after = None
    await begun("r/2")
    assert await told() == ("millrace.fetch", {**about, "millrace.fetched_tokens": WHOLE}, "")
    assert asked == [(("traceparent", CALLS),)] * 2 and recorder.open == 0


async def test_the_commit_waits_for_the_pool(worker: Direct, session: RouterSession) -> None:
    grant = await worker.lease(session, PROMPT)
    await worker.stalled(grant.lease)
    await worker.decode.receive(chunk(grant.lease, WHOLE, 14))
    worker.engine.clock = lambda: 7.0
    committing = asyncio.create_task(worker.decode.commit(sealed_commit(grant.lease, 1, waited=0.5)))
    await asyncio.sleep(0)
    assert not worker.runs(grant.lease) and not committing.done()
    worker.engine.clock = lambda: 9.0
    worker.reader.gate.set()
    assert await committing is None and worker.runs(grant.lease) and worker.holds(grant.lease)
    seq = worker.decode.table.check(grant.lease).seq
    assert seq.incoming.drawn_at == 6.5, "and the first token waits as long"


@pytest.mark.parametrize(("part", "block"), [(0, 0), (1, 1), (0, 2)])
async def test_what_the_pool_lacks_is_handed_over_after_all(
    worker: Direct, session: RouterSession, part: int, block: int
) -> None:
    worker.reader.lost = {(part, block)}
    grant = await worker.lease(session, PROMPT)
    assert await worker.decode.direct.begin(grant.lease) == WHOLE
    await worker.decode.receive(chunk(grant.lease, WHOLE, 14))
    assert await worker.decode.commit(sealed_commit(grant.lease, 1)) == range(4 * block, WHOLE)
    with pytest.raises(CorruptChunk, match="missing"):
        await worker.decode.commit(sealed_commit(grant.lease, 1))
    for wrong in (chunk(grant.lease, WHOLE, 14), chunk(grant.lease, 4 * block, 13)):
        with pytest.raises(CorruptChunk, match="order"):
            await worker.decode.receive(wrong)
    await worker.decode.receive(chunk(grant.lease, 4 * block, WHOLE))
    assert await worker.decode.commit(sealed_commit(grant.lease, 1)) is None
    assert worker.runs(grant.lease) and worker.holds(grant.lease) and worker.prefixes.fallbacks == 1


async def test_a_commit_with_kv_missing_is_refused_at_once(worker: Direct, session: RouterSession) -> None:
    grant = await worker.lease(session, PROMPT)
    assert await worker.stalled(grant.lease) == WHOLE
    with pytest.raises(CorruptChunk, match="missing"):
        await asyncio.wait_for(worker.decode.commit(sealed_commit(grant.lease, 1)), 60)
    with pytest.raises(CorruptChunk, match="order"):
        await worker.decode.receive(chunk(grant.lease, 0, 14))


async def test_beginning_anew_stops_what_still_came_and_begins_that_anew_too(
    worker: Direct, session: RouterSession
) -> None:
    old = await worker.lease(session, PROMPT)
    await worker.stalled(old.lease)
    await worker.decode.receive(chunk(old.lease, WHOLE, 14))
    committing = asyncio.create_task(worker.decode.commit(sealed_commit(old.lease, 1)))
    await asyncio.sleep(0)
    new = await session.advance(make_order(PROMPT, lease=worker.fence(epoch=1), generated=[3]))
    with pytest.raises(StaleLease):
        await asyncio.wait_for(committing, 60)
    before = [plane.view(torch.uint8).clone() for planes in worker.device_kv.planes for plane in planes]
    worker.reader.gate.set()
    for _ in range(20):
        await asyncio.sleep(0)
    after = [plane.view(torch.uint8) for planes in worker.device_kv.planes for plane in planes]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), "its blocks are the new try's now"
    assert await worker.decode.direct.begin(old.lease) == 0
    assert await worker.decode.direct.begin(new.lease) == WHOLE
    await worker.decode.receive(chunk(new.lease, WHOLE, 15))
    assert await worker.decode.commit(sealed_commit(new.lease, 1)) is None and worker.holds(new.lease)


@pytest.mark.parametrize("slabs", [0, 1])
async def test_a_lease_that_ends_meanwhile_takes_its_fetch_with_it(
    worker: Direct, session: RouterSession, slabs: int
) -> None:
    grant = await worker.lease(session, PROMPT)
    await worker.stalled(grant.lease, slabs)
    session.cancel("r/1")
    assert worker.idle()


async def test_a_lease_that_ends_while_the_pool_is_asked_gets_nothing(worker: Direct, session: RouterSession) -> None:
    worker.reader.answers.clear()
    first = await worker.lease(session, PROMPT)
    beginning = asyncio.create_task(worker.decode.direct.begin(first.lease))
    await asyncio.sleep(0)
    await session.advance(make_order(PROMPT, lease=worker.fence(epoch=1)))
    worker.reader.answers.set()
    assert await beginning == 0 and worker.prefixes.running == 0


async def test_kv_that_came_before_the_answer_is_kept(worker: Direct, session: RouterSession) -> None:
    """A sender need not wait for the answer: then nothing comes from the pool."""
    worker.reader.answers.clear()
    grant = await worker.lease(session, PROMPT)
    beginning = asyncio.create_task(worker.decode.direct.begin(grant.lease))
    await worker.decode.receive(chunk(grant.lease, 0, 8))
    worker.reader.answers.set()
    assert await beginning == 0
    await worker.decode.receive(chunk(grant.lease, 8, 14))
    assert await worker.decode.commit(sealed_commit(grant.lease, 1)) is None and worker.holds(grant.lease)


@pytest.mark.parametrize("worker", [Role.MIXED], indirect=True)
async def test_a_lease_computed_by_its_own_worker_is_left_alone(worker: Direct, session: RouterSession) -> None:
    grant = await worker.lease(session, PROMPT)
    worker.decode.adopt(grant.lease)
    assert await worker.decode.direct.begin(grant.lease) == 0 and worker.prefixes.running == 0


async def test_handoffs_are_measured_where_they_arrive(worker: Direct, session: RouterSession) -> None:
    grant = await worker.lease(session, PROMPT)
    now = iter([2.0, 2.5])
    worker.engine.clock = lambda: next(now, 9.0)
    await worker.decode.receive(chunk(grant.lease, 0, 8))
    await worker.decode.receive(chunk(grant.lease, 8, 14))
    await worker.decode.commit(sealed_commit(grant.lease, 1))
    seconds = worker.prefixes.direct_cost.byte_seconds
    assert seconds is not None and abs(seconds - 0.5 / (6 * sum(spec.token_bytes for spec in SPECS))) < 1e-12
