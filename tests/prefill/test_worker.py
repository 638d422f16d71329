"""The prefill worker's door: the first token comes out, the KV arrives, and nothing is left however a run ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from kvcache.handoff import sender as handoffs
from kvcache.handoff.chunk import Chunk, Commit
from serving.engine.plan import Work
from serving.errors import (
    ContextLengthExceeded,
    CorruptChunk,
    Draining,
    InternalError,
    NoRoom,
    Retryable,
    StaleLease,
    WorkerLost,
)
from serving.links import HandoffLink
from serving.messages import FinishReason, LeaseGrant, LeaseId, Prefilled, PrefillOrder, Role
from tests.decode.workers import Worker
from tests.fakes.sequences import lease_id, make_order
from tests.prefill.scripted import next_token, written_out

PROMPT = list(range(10))


class Link:
    """The way to a decode worker; `before_push` may wait or raise, as the worker at its end would."""

    room = None

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.committed: list[tuple[LeaseId, int]] = []
        self.waited: list[float] = []
        self.closed = 0
        self.start = 0  # what it brings itself of the KV
        self.lacking: list[range] = []  # what it asks for after all, at each commit
        self.before_push: Callable[[Chunk], object] = lambda chunk: None
        self.gate = asyncio.Event()
        self.gate.set()

    async def begin(self) -> int:
        return self.start

    async def push(self, chunk: Chunk) -> None:
        await self.gate.wait()
        self.before_push(chunk)
        self.chunks.append(chunk)

    async def commit(self, commit: Commit) -> range | None:
        self.committed.append((commit.lease, commit.first_token))
        self.waited.append(commit.waited)
        return self.lacking.pop(0) if self.lacking else None

    async def close(self) -> None:
        self.closed += 1


class Dialer:
    def __init__(self, link: Link):
        self.link = link
        self.dialled: list[str] = []

    def dial(self, grant: LeaseGrant, generation: str = "") -> HandoffLink:
        self.dialled.append(grant.address)
        return self.link


class Prefill(Worker):
    """A prefill worker whose engine runs, and the link its KV leaves by."""

    def __init__(self, role: Role = Role.PREFILL, **fields: Any):
        super().__init__(role, **fields)
        self.link = Link()
        self.prefill.dialer = Dialer(self.link)


@pytest.fixture
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[Prefill]:
    made = Prefill(getattr(request, "param", Role.PREFILL))
    made.start()
    yield made
    for session in list(made.decode.sessions.values()):
        await session.close()
    await made.loop.stop()
    assert made.idle() and made.kv.unaccounted([]) == 0


def order(prompt: Sequence[int] = PROMPT, *, granted: bool = True, cached: int = 0, **fields: Any) -> PrefillOrder:
    fence = lease_id("r/1", 2, "decode-life")
    grant = LeaseGrant(lease=fence, cached_tokens=cached, address="somewhere:1", kv_dtype="float32")
    return PrefillOrder(order=make_order(prompt, lease=fence, **fields), grant=grant if granted else None)


async def results(worker: Prefill, wanted: PrefillOrder) -> list[Prefilled]:
    return [prefilled async for prefilled in worker.prefill.run(wanted)]


async def test_what_comes_free_of_the_pool_wakes_the_engine() -> None:
    """Blocks that have been copied to be stored, and those that a fetch wrote to when its sequence had ended."""
    worker = Prefill(Role.MIXED, pool_link=lambda address: pytest.fail(f"{address} is dialled"))
    connector = worker.worker.connector
    assert connector is not None and connector.direct is not None
    for freed in (connector.prefixes.freed, connector.direct.freed):
        worker.loop._awake = False
        freed()
        assert worker.loop._awake
    worker.loop._awake = False
    connector.start()  # whereupon what the last one was sending, if anything, is let go
    async with asyncio.timeout(30):
        while not worker.loop._awake:
            await asyncio.sleep(0.01)
    await connector.stop()


async def test_the_first_token_comes_out_and_all_kv_arrives(worker: Prefill) -> None:
    (prefilled,) = await results(worker, order(cached=3))
    assert prefilled.delta.tokens == (next_token(PROMPT),) and prefilled.delta.index == 0
    (dialled,) = {*worker.prefill.dialer.dialled}  # type: ignore[attr-defined]
    assert dialled == "somewhere:1" and worker.link.closed == 1
    assert worker.link.committed == [(lease_id("r/1", 2, "decode-life"), next_token(PROMPT))]
    for layer in range(2):
        spans = [(c.start, c.end) for c in worker.link.chunks if c.first_layer <= layer < c.last_layer]
        assert [p for start, end in spans for p in range(start, end)] == list(range(3, 10))
    assert worker.prefill.bytes_sent == sum(len(chunk.payload) for chunk in worker.link.chunks)


def handed_over(link: Link, layer: int) -> list[int]:
    """Tokens of the layer, in the order they left."""
    return [p for c in link.chunks if c.first_layer <= layer < c.last_layer for p in range(c.start, c.end)]


async def test_what_the_decode_worker_brings_itself_is_not_sent(worker: Prefill) -> None:
    worker.link.start = 6
    await results(worker, order(cached=3))
    assert [handed_over(worker.link, layer) for layer in range(2)] == [[6, 7, 8, 9]] * 2
    assert len(worker.link.committed) == 1


async def test_what_it_could_not_bring_after_all_is_sent_last(worker: Prefill) -> None:
    worker.link.start, worker.link.lacking = 8, [range(4, 8)]
    await results(worker, order())
    assert [handed_over(worker.link, layer) for layer in range(2)] == [[8, 9, 4, 5, 6, 7]] * 2
    assert worker.link.committed == [(lease_id("r/1", 2, "decode-life"), next_token(PROMPT))] * 2
    assert worker.prefill.bytes_sent == sum(len(chunk.payload) for chunk in worker.link.chunks)


async def test_the_decode_worker_is_told_how_long_the_first_token_has_waited(worker: Prefill) -> None:
    """Each push after it takes a second, and so does what is asked for after all."""
    times = iter(range(1000))
    worker.engine.clock = lambda: float(next(times))
    worker.link.start, worker.link.lacking = 8, [range(4, 8)]
    await results(worker, order())
    first, second = worker.link.waited
    assert 0.0 < first < second


@pytest.mark.parametrize("lacking", [[range(4, 11)], [range(4, 8), range(4, 8)]])
async def test_a_decode_worker_that_asks_for_what_there_is_not_ends_the_run(
    worker: Prefill, lacking: list[range]
) -> None:
    worker.link.start, worker.link.lacking = 8, lacking
    with pytest.raises(StaleLease):
        await results(worker, order())


async def test_the_next_token_of_a_request_under_way_is_drawn_from_all_its_tokens(worker: Prefill) -> None:
    output = written_out(PROMPT, 3)
    (prefilled,) = await results(worker, order(generated=output))
    assert prefilled.delta.tokens == (written_out(PROMPT, 4)[3],) and prefilled.delta.index == 3


async def test_without_a_lease_nothing_is_sent(worker: Prefill) -> None:
    (prefilled,) = await results(worker, order(granted=False, max_tokens=1))
    assert prefilled.delta.finish is FinishReason.LENGTH
    assert worker.link.closed == 0 and worker.link.chunks == []


async def test_a_prompt_known_already_is_counted_as_cached(worker: Prefill) -> None:
    await results(worker, order())
    (again,) = await results(worker, order())
    assert again.cached_tokens == again.delta.cached_tokens == 8
    assert sum(len(chunk.payload) for chunk in worker.link.chunks) == worker.prefill.bytes_sent


@pytest.mark.parametrize("error", [CorruptChunk("harmed"), StaleLease("over"), NoRoom("full")])
async def test_a_refused_chunk_ends_the_run(worker: Prefill, error: Exception) -> None:
    def refuse(chunk: Chunk) -> None:
        raise error

    worker.link.before_push = refuse
    with pytest.raises(type(error)):
        await results(worker, order())
    assert worker.link.closed == 1 and worker.link.committed == []


async def test_a_lost_decode_worker_is_not_taken_for_a_lost_prefill_worker(worker: Prefill) -> None:
    """A router gives a lost worker no more work, and gives up all that runs there."""

    def lose(chunk: Chunk) -> None:
        raise WorkerLost("the decode worker is gone")

    worker.link.before_push = lose
    with pytest.raises(Retryable) as raised:
        await results(worker, order())
    assert not isinstance(raised.value, WorkerLost)


async def test_kv_that_cannot_be_read_is_the_prefill_workers_own_loss(
    worker: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that keeps some of it is gone: the decode worker, whose lease is kept, is not to blame."""

    def lost(*_: object, **__: object) -> Chunk:
        raise WorkerLost("its KV cannot be copied: rank 1 of the group is lost")

    monkeypatch.setattr(handoffs, "encode", lost)
    with pytest.raises(WorkerLost, match="rank 1"):
        await results(worker, order())


async def test_a_refusal_does_not_wait_for_the_rest_of_the_prompt(worker: Prefill) -> None:
    """A long prompt's first chunk is refused, at the latest while its second step runs: no third one begins."""
    over = threading.Event()
    worker.runner.during = lambda work: assert_set(over) if len(worker.runner.counts) == 2 else None

    def refuse(chunk: Chunk) -> None:
        raise StaleLease("over")

    worker.link.before_push = refuse
    with pytest.raises(StaleLease):
        await results(worker, order(list(range(100))))
    over.set()
    await asyncio.to_thread(until, worker.idle)
    assert len(worker.runner.counts) <= 2


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came to be")


@pytest.mark.parametrize("when", ["computing", "sending"])
async def test_leaving_a_run_frees_everything(worker: Prefill, when: str) -> None:
    going, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def compute(work: Sequence[Work]) -> None:
        loop.call_soon_threadsafe(going.set)
        assert_set(go_on)

    if when == "computing":
        worker.runner.during = compute
    else:
        worker.link.gate.clear()
        go_on.set()
    running = asyncio.create_task(results(worker, order()))
    if when == "computing":
        await going.wait()
    else:
        while not (worker.runner.counts and worker.prefill.sequences()):
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert worker.prefill.sequences() == [] and worker.link.committed == [] and worker.link.closed == 1
    go_on.set()
    await asyncio.to_thread(until, worker.idle)


async def test_closing_the_iterator_after_the_first_token_cancels_the_handoff(worker: Prefill) -> None:
    worker.link.gate.clear()
    async with aclosing(worker.prefill.run(order())) as run:
        async for prefilled in run:
            assert prefilled.delta.finish is None
            break
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("handoff")], "it reads freed blocks"
    assert worker.link.closed == 1 and worker.link.committed == [] and worker.idle()


async def test_a_sequence_that_cannot_be_sampled_ends_its_run(worker: Prefill) -> None:
    worker.runner.broken = {"r"}
    with pytest.raises(InternalError):
        await results(worker, order())
    assert worker.link.committed == []


async def test_a_prompt_that_leaves_no_room_to_generate_is_refused(worker: Prefill) -> None:
    with pytest.raises(ContextLengthExceeded):
        await results(worker, order([0] * 128))


async def test_the_engines_death_ends_every_run(worker: Prefill) -> None:
    worker.link.gate.clear()
    worker.runner.during = lambda work: None
    with worker.engine.lock:  # the engine cannot take the prompt up
        running = asyncio.create_task(results(worker, order()))
        while not worker.prefill.sequences() or not worker.prefilling.queue:
            await asyncio.sleep(0)
        worker.prefill.abandon(WorkerLost("the engine died"))
        with pytest.raises(WorkerLost):
            await running


async def test_draining_waits_for_the_last_handoff(worker: Prefill) -> None:
    worker.link.gate.clear()
    running = asyncio.create_task(results(worker, order()))
    while not worker.prefill.sequences():
        await asyncio.sleep(0)
    draining = asyncio.create_task(worker.prefill.drain(60))
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        await results(worker, order())
    assert not draining.done()
    worker.link.gate.set()
    await draining
    assert len(await running) == 1 and len(worker.link.committed) == 1


@pytest.mark.parametrize("worker", [Role.MIXED], indirect=True)
async def test_a_lease_of_its_own_is_computed_in_place(worker: Prefill) -> None:
    session = await worker.session()
    grant = await worker.lease(session, PROMPT, max_tokens=4)
    own = PrefillOrder(order=make_order(PROMPT, lease=grant.lease, max_tokens=4), grant=grant)
    (prefilled,) = await results(worker, own)
    while not worker.idle():
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    deltas = [prefilled.delta, *(event.delta for event in worker.events if event.delta is not None)]
    assert [token for delta in deltas for token in delta.tokens] == written_out(PROMPT, 4)
    assert worker.link.chunks == [] and worker.prefill.dialer.dialled == []  # type: ignore[attr-defined]


async def test_a_first_token_that_ends_the_request_is_told_though_its_kv_is_still_leaving(
    worker: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for KV that nothing will be decoded from."""
    monkeypatch.setattr(handoffs, "CHUNK_BYTES", 16)
    worker.link.gate.clear()
    running = results(worker, order([1, 2, 3], stop_token_ids=(next_token([1, 2, 3]),)))
    async with asyncio.timeout(60):
        (prefilled,) = await running
    assert prefilled.delta.finish is FinishReason.STOP
