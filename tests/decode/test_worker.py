"""The decode worker's doors: leases are opened, filled, run, begun anew, handed back and ended without a trace."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from decode.worker import RouterSession
from kvcache.handoff.chunk import LONGEST_WAIT, Chunk, encode, sealed_commit
from kvcache.memory.kv_dtype import choose_wire
from serving.errors import (
    BESIDE_STEP,
    IN_STEP,
    ContextLengthExceeded,
    CorruptChunk,
    Draining,
    InvalidRequest,
    NoRoom,
    Preempted,
    StaleLease,
)
from serving.messages import FinishReason, LeaseGrant, LeaseId, Role, Slo
from tests.decode.workers import FINGERPRINT, SPECS, Worker
from tests.fakes.kv_layouts import random_pool, token_at
from tests.fakes.sequences import make_order, make_sequence
from tests.prefill.scripted import next_token, written_out

PROMPT = list(range(10))
SOURCE = random_pool(SPECS, 8, 4, 7)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker(Role.DECODE)
    yield made
    for session in list(made.decode.sessions.values()):
        await session.close()
    assert made.idle() and made.kv.unaccounted([]) == 0, "a session that ends takes everything with it"


@pytest.fixture
async def session(worker: Worker) -> RouterSession:
    return await worker.session()


def chunk(fence: LeaseId, start: int, end: int, layers: range = range(2)) -> Chunk:
    return encode(SOURCE, fence, FINGERPRINT, layers, list(range(8)), start, end)


async def hand_over(worker: Worker, grant: LeaseGrant, tokens: list[int], waited: float = 0.0) -> int:
    """All KV of these tokens, and the first token after them."""
    if grant.cached_tokens < len(tokens):
        await worker.decode.receive(chunk(grant.lease, grant.cached_tokens, len(tokens)))
    seq = worker.decode.table.check(grant.lease).seq
    worker.runner.write(seq.prefix.root, seq.tokens, seq.blocks, seq.computed)
    first = next_token(tokens)
    await worker.decode.commit(sealed_commit(grant.lease, first, waited))
    return first


@pytest.mark.parametrize("waited", [0.0, 0.4, -1.0, 1e300, float("inf"), float("nan")])
async def test_the_pace_of_a_text_counts_from_its_first_token(
    worker: Worker, session: RouterSession, waited: float
) -> None:
    """Which its client has had since the prefill worker drew it, whatever the handoff takes."""
    grant = await worker.lease(session, PROMPT, first_token_in=1.0, max_tokens=4, slo=Slo(tpot_ms=50.0))
    await hand_over(worker, grant, PROMPT, waited)
    goals = worker.decode.table.check(grant.lease).seq.objectives
    worker.step()
    age = {0.4: 0.4, 1e300: LONGEST_WAIT, float("inf"): LONGEST_WAIT}.get(waited, 0.0)
    assert not goals.missed and goals.slack(len(PROMPT) + 1, 0.0) == pytest.approx(0.05 - age)


async def test_a_lease_holds_room_then_decodes_then_is_gone(worker: Worker, session: RouterSession) -> None:
    grant = await worker.lease(session, PROMPT, max_tokens=4)
    assert (grant.cached_tokens, grant.address) == (0, "local:decode") and worker.kv.allocator.held == 3
    tokens = [await hand_over(worker, grant, PROMPT)]
    seq = worker.decode.table.check(grant.lease).seq
    for layer in range(2):
        for position in range(len(PROMPT)):
            there = token_at(SOURCE, layer, list(range(8)), position)
            assert token_at(worker.device_kv, layer, seq.blocks, position) == there
    while not worker.idle():
        worker.step()
    deltas = [event.delta for event in worker.events if event.delta is not None]
    assert [delta.index for delta in deltas] == [1, 2, 3]
    assert tokens + [token for delta in deltas for token in delta.tokens] == written_out(PROMPT, 4)
    assert deltas[-1].finish is FinishReason.LENGTH
    assert await worker.lease(session, PROMPT, "r/2") == LeaseGrant(
        lease=worker.fence("r/2"), cached_tokens=8, address="local:decode", kv_dtype="float32"
    )


async def test_all_leases_of_a_session_are_told_in_one_message_a_step(worker: Worker) -> None:
    messages: list[int] = []
    session = await worker.decode.connect("router", lambda events: messages.append(len(events)), lambda error: None)
    for n in range(3):
        await hand_over(worker, await worker.lease(session, [n, n], f"r/{n}"), [n, n])
    worker.step()
    worker.step()
    assert messages == [3, 3]


async def test_room_is_refused_when_there_is_none(worker: Worker, session: RouterSession) -> None:
    for n in range(worker.engine.limits.max_num_seqs):
        await worker.lease(session, [n], f"r/{n}")
    with pytest.raises(NoRoom, match="its limit"):
        await worker.lease(session, [9], "r/9")
    session.cancel("r/3")
    await worker.lease(session, [9], "r/9")


async def test_a_lease_leaves_the_running_ones_a_block_each_to_grow_into(
    session: RouterSession, worker: Worker
) -> None:
    await worker.lease(session, range(11), "r/1")  # 3 blocks of 32
    with pytest.raises(NoRoom, match="spare"):
        await worker.lease(session, range(115), "r/2")  # all 29 others
    await worker.lease(session, range(111), "r/3")  # 28 of them
    assert len(worker.decode.table.leases) == 2


async def test_a_prompt_that_leaves_no_room_to_generate_is_refused(session: RouterSession, worker: Worker) -> None:
    with pytest.raises(ContextLengthExceeded, match="128 tokens leave no room"):
        await worker.lease(session, [0] * 128)
    await worker.lease(session, [0] * 127)


async def test_the_same_lease_cannot_be_opened_twice(session: RouterSession, worker: Worker) -> None:
    await worker.lease(session, PROMPT)
    held = worker.kv.allocator.held
    with pytest.raises(InvalidRequest, match="already open"):
        await worker.lease(session, PROMPT)
    assert worker.kv.allocator.held == held


async def test_a_router_reaches_its_own_leases_alone(session: RouterSession, worker: Worker) -> None:
    """Two routers may name a lease alike: neither ends nor begins anew what the other holds."""
    await worker.lease(session, PROMPT)
    other = await worker.decode.connect("router", lambda events: None, lambda error: None)
    with pytest.raises(InvalidRequest, match="already open"):
        await worker.lease(other, PROMPT)
    other.cancel("r/1")
    with pytest.raises(StaleLease, match="not open here"):
        await other.advance(make_order(PROMPT, lease=worker.fence(epoch=1)))
    await other.close()
    lease = worker.decode.table.leases["r/1"]
    assert lease.fence == worker.fence() and lease.session == session.name


async def test_an_order_for_another_life_takes_nothing(session: RouterSession, worker: Worker) -> None:
    fence = LeaseId(lease="r/1", epoch=0, instance="before")
    with pytest.raises(StaleLease):
        await session.open(make_order(PROMPT, lease=fence))
    assert worker.kv.allocator.held == 0


async def test_beginning_anew_shuts_out_what_the_last_try_still_sends(session: RouterSession, worker: Worker) -> None:
    old = await worker.lease(session, PROMPT)
    await worker.decode.receive(chunk(old.lease, 0, 4))
    new = await session.advance(make_order(PROMPT, lease=worker.fence(epoch=1), generated=[3]))
    for late in (chunk(old.lease, 4, 8), chunk(old.lease, 0, 4)):
        with pytest.raises(StaleLease):
            await worker.decode.receive(late)
    with pytest.raises(StaleLease):
        await worker.decode.commit(sealed_commit(old.lease, 1))
    await hand_over(worker, new, [*PROMPT, 3])
    worker.step()
    assert [event.epoch for event in worker.events] == [1]
    assert worker.decode.refused == {"epoch": 3}


@pytest.mark.parametrize(("start", "end"), [(4, 8), (0, 11)])
async def test_kv_out_of_order_is_refused_and_the_handoff_may_go_on(
    session: RouterSession, worker: Worker, start: int, end: int
) -> None:
    grant = await worker.lease(session, PROMPT)
    with pytest.raises(CorruptChunk):
        await worker.decode.receive(chunk(grant.lease, start, end))
    assert worker.decode.refused == {"order": 1}
    await hand_over(worker, grant, PROMPT)


async def test_a_commit_with_kv_missing_is_refused(session: RouterSession, worker: Worker) -> None:
    grant = await worker.lease(session, PROMPT)
    await worker.decode.receive(chunk(grant.lease, 0, 10, range(1)))
    with pytest.raises(CorruptChunk, match="missing"):
        await worker.decode.commit(sealed_commit(grant.lease, 1))
    assert worker.decoding.running == [] and worker.kv.allocator.match(worker.decode.sequences()[0].prefix.keys) == []


async def test_a_preempted_lease_ends_with_its_error() -> None:
    worker = Worker(Role.DECODE, blocks=4, size=2)
    session = await worker.session()
    old = await worker.lease(session, [0, 1, 0], "r/1", max_tokens=99)
    await hand_over(worker, old, [0, 1, 0])
    worker.step()
    young = await worker.lease(session, [1], "r/2", max_tokens=99)
    await hand_over(worker, young, [1])
    while all(event.error is None for event in worker.events):
        worker.step()
    errors = [(event.lease, type(event.error)) for event in worker.events if event.error is not None]
    assert errors == [("r/2", Preempted)]
    assert list(worker.decode.table.leases) == ["r/1"] and worker.kv.unaccounted(worker.decode.sequences()) == 0


async def test_a_prompt_that_waits_for_blocks_gets_them_before_new_leases() -> None:
    """A mixed worker computes it for a lease elsewhere, whose room is taken meanwhile."""
    worker = Worker(Role.MIXED, blocks=8, size=2)
    session = await worker.session()
    await worker.lease(session, [0, 1, 0], "r/1")
    elsewhere = make_sequence(worker.kv, range(13))
    worker.prefilling.add(elsewhere)
    worker.step()
    with pytest.raises(NoRoom):
        await worker.lease(session, [1, 0], "r/2")
    session.cancel("r/1")
    with pytest.raises(NoRoom):
        await worker.lease(session, [1, 0], "r/2")
    worker.step()
    assert len(elsewhere.blocks) == 7
    await worker.lease(session, [1], "r/2")
    await session.close()
    worker.engine.end(elsewhere)
    assert worker.idle()


async def test_a_cancelled_lease_is_silent_even_if_its_step_was_running(session: RouterSession, worker: Worker) -> None:
    grant = await worker.lease(session, PROMPT)
    await hand_over(worker, grant, PROMPT)
    worker.runner.during = lambda work: session.cancel("r/1")
    worker.step()
    assert worker.events == [] and worker.idle()


async def test_draining_waits_for_the_leases_there_are(session: RouterSession, worker: Worker) -> None:
    grant = await worker.lease(session, PROMPT, max_tokens=3)
    draining = asyncio.create_task(worker.decode.drain(60))
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        await worker.lease(session, PROMPT, "r/2")
    await hand_over(worker, grant, PROMPT)
    while not worker.idle():
        assert not draining.done()
        worker.step()
    await draining


async def test_draining_sends_the_rest_elsewhere_when_time_is_up(session: RouterSession, worker: Worker) -> None:
    await worker.lease(session, PROMPT)
    await worker.decode.drain(0)
    assert [(event.lease, type(event.error)) for event in worker.events] == [("r/1", Draining)]
    assert worker.idle()


@pytest.mark.parametrize("crash", [True, False])
async def test_tokens_that_a_step_still_accounts_for_are_not_told_with_the_end(
    session: RouterSession, worker: Worker, crash: bool
) -> None:
    """The engine's thread appends a token before it is told of, and zeros for tokens that are not known yet."""
    grant = await worker.lease(session, PROMPT)
    await hand_over(worker, grant, PROMPT)
    worker.step()
    leases = list(worker.decode.sequences())
    leases[0].tokens.append(0)
    if crash:
        worker.decode.abandon(NoRoom("the engine died"))
        worker.engine.end(leases[0])
    else:
        await worker.decode.drain(0)
    assert [event.delta is None for event in worker.events] == [False, True], "what was told, and the end"


async def test_draining_ends_with_the_engine(session: RouterSession, worker: Worker) -> None:
    await worker.lease(session, PROMPT)
    draining = asyncio.create_task(worker.decode.drain(10_000.0))
    await asyncio.sleep(0)
    leases = list(worker.decode.sequences())
    worker.decode.abandon(NoRoom("the engine died"))
    async with asyncio.timeout(60):  # else it would wait out its whole patience
        await draining
    for seq in leases:
        worker.kv.release(seq)


async def test_draining_notices_a_lease_that_could_not_begin_anew(session: RouterSession, worker: Worker) -> None:
    await worker.lease(session, PROMPT)
    draining = asyncio.create_task(worker.decode.drain(10_000.0))
    await asyncio.sleep(0)
    blocks = worker.kv.allocator.allocate(worker.kv.allocator.available)  # somebody else's
    with pytest.raises(NoRoom):
        await session.advance(make_order([*PROMPT, 1, 2, 3], lease=worker.fence(epoch=1)))
    worker.kv.allocator.release(blocks)
    assert worker.decode.table.leases == {}
    async with asyncio.timeout(60):  # else it would wait out its whole patience
        await draining


async def test_the_engines_death_is_told_to_every_lease(session: RouterSession, worker: Worker) -> None:
    await worker.lease(session, PROMPT, "r/1")
    await worker.lease(session, PROMPT, "r/2")
    leases = list(worker.decode.sequences())
    worker.decode.abandon(NoRoom("the engine died"))
    assert [event.lease for event in worker.events] == ["r/1", "r/2"] and worker.decode.draining
    for seq in leases:
        worker.kv.release(seq)


@pytest.mark.parametrize("begun", [True, False], ids=["in a step", "while one was planned"])
async def test_the_engines_death_names_what_was_in_its_step(
    worker: Worker, session: RouterSession, begun: bool
) -> None:
    """Whoever waited beside it had no part in it; where no step had begun, anyone may have had."""
    granted = await worker.lease(session, PROMPT, "r/1")
    await worker.lease(session, PROMPT, "r/2")
    await hand_over(worker, granted, PROMPT)
    leases = list(worker.decode.sequences())

    def fail(*arguments: object) -> None:
        raise MemoryError("the device is full")

    if begun:
        worker.runner.during = fail
    else:
        worker.decoding.fill = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        worker.step()
    worker.worker._crashed()
    assert [event.error.code for event in worker.events if event.error is not None] == (
        [IN_STEP, BESIDE_STEP] if begun else [IN_STEP, IN_STEP]
    )
    for seq in leases:
        worker.decoding.remove(seq)
        worker.kv.release(seq)


@pytest.mark.parametrize("kv_wire", ["auto", "int8"])
async def test_kv_that_lost_bits_on_its_way_is_known_as_such(kv_wire: str) -> None:
    """Nobody else may be given it."""
    worker = Worker(Role.DECODE)
    session = await worker.session()
    grant = await worker.lease(session, PROMPT)
    wire = choose_wire(SPECS, SPECS, kv_wire)
    await worker.decode.receive(
        encode(SOURCE, grant.lease, FINGERPRINT, range(2), list(range(8)), 0, len(PROMPT), wire=wire)
    )
    [seq] = worker.decode.sequences()
    assert seq.incoming.lossy == (kv_wire == "int8")
    await session.close()
    assert worker.idle()


async def test_refusals_are_counted_and_read_under_one_lock() -> None:
    """Chunks are refused on several threads; a heartbeat that read the counts meanwhile broke."""
    worker = Worker(Role.DECODE)
    held: list[bool] = []

    class Watched(Counter[str]):
        def keys(self) -> Any:
            held.append(worker.engine.lock._is_owned())  # type: ignore[attr-defined]
            return super().keys()

        def __iter__(self) -> Any:
            held.append(worker.engine.lock._is_owned())  # type: ignore[attr-defined]
            return super().__iter__()

    worker.decode.refused = Watched({"digest": 2})
    assert worker.decode.counters()["kv_chunks_refused/digest"] == 2.0
    assert held and all(held)
