"""A decode worker with host memory: leases longer than its device are filled, checked, run and ended like any other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from decode.worker import RouterSession
from kvcache.blocks.offload import OffloadPlan
from kvcache.handoff.chunk import Chunk, encode, sealed, sealed_commit
from kvcache.memory.kv_copies import HostCopies
from serving.engine.sequence import SequenceState
from serving.errors import ContextLengthExceeded, CorruptChunk, MillraceError, NoRoom, StaleLease
from serving.messages import LeaseId, Role
from tests.decode.workers import FINGERPRINT, SPECS, Worker
from tests.fakes.kv_layouts import random_pool, token_at
from tests.fakes.sequences import make_order
from tests.prefill.scripted import next_token, written_out

PLAN = OffloadPlan(
    block_size=4, device_blocks=12, extent_blocks=2, extents=8, segment_extents=1
)  # 9 blocks of a sequence
PROMPT = [n % 5 for n in range(70)]
SOURCE = random_pool(SPECS, 20, 4, 7)


@pytest.fixture
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    made = Worker(getattr(request, "param", Role.DECODE), blocks=PLAN.device_blocks, host=PLAN)
    yield made
    for session in list(made.decode.sessions.values()):
        await session.close()
    assert made.idle() and made.kv.unaccounted([]) == 0
    assert made.kv.host is not None and made.kv.host.unaccounted([]) == 0


@pytest.fixture
async def session(worker: Worker) -> RouterSession:
    return await worker.session()


def chunk(fence: LeaseId, start: int, end: int, layers: range = range(2)) -> Chunk:
    return encode(SOURCE, fence, FINGERPRINT, layers, list(range(20)), start, end)


async def fill(worker: Worker, fence: LeaseId) -> SequenceState:
    """Hand all KV over, in chunks that end within extents, and within what the device keeps."""
    for start in range(0, len(PROMPT), 13):
        for layers in (range(1), range(1, 2)):
            await worker.decode.receive(chunk(fence, start, min(start + 13, len(PROMPT)), layers))
    seq: SequenceState = worker.decode.table.check(fence).seq
    worker.runner.arrive(seq)
    return seq


def run(worker: Worker) -> list[int]:
    """Step until nothing is left; the tokens that came out."""
    while not worker.idle():
        worker.step()
    return [token for event in worker.events if event.delta is not None for token in event.delta.tokens]


async def test_its_kv_lands_in_both_memories_and_it_decodes_from_there(worker: Worker, session: RouterSession) -> None:
    grant = await worker.lease(session, PROMPT, max_tokens=16)
    assert grant.cached_tokens == 0
    seq = await fill(worker, grant.lease)
    assert seq.offload is not None and worker.host_kv is not None
    border = seq.offload.moved * PLAN.extent_tokens
    assert 0 < border < len(PROMPT) <= border + len(seq.blocks) * 4
    for layer in range(2):
        for position in range(len(PROMPT)):
            there = token_at(SOURCE, layer, list(range(20)), position)
            if position < border:
                found = token_at(worker.host_kv.memory, layer, seq.offload.extents, position)
            else:
                found = token_at(worker.device_kv, layer, seq.blocks, position - border)
            assert found == there, f"token {position}"
    first = next_token(PROMPT)
    await worker.decode.commit(sealed_commit(grant.lease, first))
    assert [first, *run(worker)] == written_out(PROMPT, 16)
    assert worker.kv.host is not None and worker.kv.host.tokens_moved > 0, "it grew beyond what it was opened with"


@pytest.mark.parametrize(
    ("harm", "error", "reason"),
    [
        (lambda c: replace(c, payload=bytes([c.payload[0] ^ 1]) + bytes(c.payload[1:])), CorruptChunk, "digest"),
        (lambda c: sealed(replace(c, payload=bytes(c.payload)[:-4])), CorruptChunk, "length"),
        (lambda c: sealed(replace(c, first_layer=1, last_layer=3)), CorruptChunk, "range"),
        (lambda c: sealed(replace(c, start=c.start + 4, end=c.end + 4)), CorruptChunk, "order"),
        (lambda c: sealed(replace(c, layout="another")), StaleLease, "layout"),
        (lambda c: sealed(replace(c, lease=replace(c.lease, epoch=7))), StaleLease, "epoch"),
        (lambda c: sealed(replace(c, lease=replace(c.lease, instance="past life"))), StaleLease, "instance"),
        (lambda c: sealed(replace(c, lease=replace(c.lease, lease="unknown"))), StaleLease, "lease"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_wrong_chunk_for_the_host_is_refused_and_writes_nothing(
    worker: Worker, session: RouterSession, harm: Callable[[Chunk], Chunk], error: type[MillraceError], reason: str
) -> None:
    grant = await worker.lease(session, PROMPT, max_tokens=4)
    assert worker.host_kv is not None
    with pytest.raises(error) as raised:
        await worker.decode.receive(harm(chunk(grant.lease, 0, 16)))
    assert raised.value.code == reason and worker.decode.refused == {reason: 1}
    assert not any(plane.any() for planes in worker.host_kv.planes for plane in planes)
    await fill(worker, grant.lease)
    await worker.decode.commit(sealed_commit(grant.lease, next_token(PROMPT)))
    assert [next_token(PROMPT), *run(worker)] == written_out(PROMPT, 4), "the handoff may go on"


async def test_a_new_epoch_shuts_out_what_the_last_one_still_sends_to_the_host(
    worker: Worker, session: RouterSession
) -> None:
    old = await worker.lease(session, PROMPT, max_tokens=4)
    await worker.decode.receive(chunk(old.lease, 0, 20))
    new = await session.advance(make_order(PROMPT, lease=worker.fence(epoch=1), max_tokens=4))
    for late in (chunk(old.lease, 20, 40), chunk(old.lease, 0, 20)):
        with pytest.raises(StaleLease):
            await worker.decode.receive(late)
    with pytest.raises(CorruptChunk, match="missing"):
        await worker.decode.commit(sealed_commit(new.lease, 1))
    await fill(worker, new.lease)
    await worker.decode.commit(sealed_commit(new.lease, next_token(PROMPT)))
    assert [next_token(PROMPT), *run(worker)] == written_out(PROMPT, 4)


@pytest.mark.parametrize("across", [False, True], ids=["on the host", "in both memories"])
async def test_only_what_is_written_is_kept_of_a_lease_that_begins_anew_meanwhile(
    worker: Worker, session: RouterSession, monkeypatch: pytest.MonkeyPatch, across: bool
) -> None:
    """So there is room for the new epoch, which takes as much as the old one did."""
    old = await worker.lease(session, PROMPT, max_tokens=4)
    seq = worker.decode.table.check(old.lease).seq
    assert seq.offload is not None
    blocks, extents = list(seq.blocks), list(seq.offload.extents)
    border = len(extents) * PLAN.extent_tokens
    start, end = (border - 3, border + 2) if across else (0, 10)
    if start:
        await worker.decode.receive(chunk(old.lease, 0, start))
    put, kept = HostCopies.put, []

    def begin_anew(self: HostCopies, *args: Any) -> None:
        if not kept:
            kept.extend(worker.kv.kept)
            worker.decode.advance(make_order(PROMPT, lease=worker.fence(epoch=1), max_tokens=4), session.name)
        put(self, *args)

    written = {(n // 8, "host") if n < border else ((n - border) // 4, "device") for n in range(start, end)}
    monkeypatch.setattr(HostCopies, "put", begin_anew)
    with pytest.raises(StaleLease):
        await worker.decode.receive(chunk(old.lease, start, end))
    assert len(kept) == 1 and worker.kv.kept == []
    assert {(extents.index(one), "host") for one in kept[0].extents} | {
        (blocks.index(one), "device") for one in kept[0].blocks
    } == written
    await fill(worker, worker.fence(epoch=1))


@pytest.mark.parametrize("filled", [0, 20, 70])
async def test_a_lease_that_ends_while_it_is_filled_frees_the_host(
    worker: Worker, session: RouterSession, filled: int
) -> None:
    grant = await worker.lease(session, PROMPT)
    assert worker.kv.host is not None and worker.kv.host.extents.held > 0, "held from the first on"
    if filled:
        await worker.decode.receive(chunk(grant.lease, 0, filled))
    session.cancel(grant.lease.lease)
    assert worker.idle()
    with pytest.raises(StaleLease):
        await worker.decode.receive(chunk(grant.lease, filled, 70) if filled < 70 else chunk(grant.lease, 0, 1))


async def test_one_that_finds_no_room_now_waits_and_one_that_never_could_is_told(
    worker: Worker, session: RouterSession
) -> None:
    await worker.lease(session, PROMPT)
    with pytest.raises(NoRoom):
        await worker.lease(session, PROMPT, "r/2")
    session.cancel("r/1")
    await worker.lease(session, PROMPT, "r/2")
    with pytest.raises(ContextLengthExceeded):
        await worker.lease(session, [0] * PLAN.tokens, "r/3")


async def test_without_host_memory_it_answers_as_ever() -> None:
    worker = Worker(Role.DECODE, blocks=PLAN.device_blocks)
    session = await worker.session()
    with pytest.raises(ContextLengthExceeded):
        await worker.lease(session, PROMPT)
    assert worker.idle()


@pytest.mark.parametrize("worker", [Role.MIXED], indirect=True)
async def test_a_prompt_that_is_computed_here_after_all_begins_on_the_device(
    worker: Worker, session: RouterSession
) -> None:
    """Though some of its KV had come from elsewhere, and was laid into the host."""
    grant = await worker.lease(session, PROMPT, max_tokens=4)
    await worker.decode.receive(chunk(grant.lease, 0, 70))
    seq = worker.decode.adopt(grant.lease)
    worker.prefilling.add(seq)
    while len(seq.tokens) == len(PROMPT):
        worker.step()
    first = seq.tokens[len(PROMPT) :]
    assert [*first, *run(worker)] == written_out(PROMPT, 4)
