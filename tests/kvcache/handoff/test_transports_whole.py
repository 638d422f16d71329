"""Whole handoffs into a real decode worker over every transport: bit for bit, refused by name, and nothing left."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import pytest

from decode.worker import RouterSession
from kvcache.handoff import sender as handoffs
from kvcache.handoff.chunk import Chunk, encode, sealed, sealed_commit
from kvcache.handoff.dialer import Dialer
from kvcache.handoff.grpc_stream import GrpcHandoff
from kvcache.handoff.sender import Handoff
from kvcache.memory.device import Bytes
from kvcache.transfer.lent_memory import LentBuffers, MemoryLender
from serving.errors import CorruptChunk, MillraceError, StaleLease, WorkerLost
from serving.links import HandoffLink
from serving.messages import LeaseGrant, Role, TransportOffer
from tests.decode.workers import FINGERPRINT, SPECS, Worker
from tests.fakes.kv_layouts import random_pool, token_at
from tests.fakes.sequences import lease_id, make_order, make_sequence
from tests.house.source import ROOT
from tests.kvcache.reaching import BESIDE, STREAMS, TRANSPORTS, Way, granted, way_to

pytestmark = pytest.mark.thorough

PROMPT = list(range(50))
SOURCE = random_pool(SPECS, 16, 4, 7)
BLOCKS = list(range(16))


@dataclass
class World:
    """A decode worker with one lease open, and a way to it."""

    worker: Worker
    way: Way
    session: RouterSession
    grant: LeaseGrant

    def dial(self) -> HandoffLink:
        return self.way.dialer.dial(replace(self.grant, address=self.way.address), self.way.generation)

    def chunk(self, start: int = 0, end: int = len(PROMPT), layers: range = range(2)) -> Chunk:
        return encode(SOURCE, self.grant.lease, FINGERPRINT, layers, BLOCKS, start, end)

    async def push(self, *chunks: Chunk) -> None:
        """All of them and a commit, on a handoff of their own."""
        link = self.dial()
        try:
            for chunk in chunks:
                await link.push(chunk)
            await link.commit(sealed_commit(chunks[-1].lease, 5))
        finally:
            await link.close()

    async def let_go(self) -> None:
        """Wait until no handoff is being received."""
        async with asyncio.timeout(60):
            while self.worker.decode.receiving:
                await asyncio.sleep(0.001)

    def lendable(self) -> int:
        """How many handoffs could be lent buffers now, less those that there are."""
        parts = self.lender.lending.parts
        found = [lent for _ in range(parts) if (lent := self.lender.lend())]
        for lent in found:
            lent.give_back(settled=True)
        return len(found) - parts

    @property
    def lender(self) -> MemoryLender:
        lender = self.way.lenders.of(self.way.kind)
        assert lender is not None
        return lender

    @property
    def memory(self) -> Bytes:
        """What the buffers lie in."""
        return self.lender.memory


async def world_of(kind: str) -> AsyncIterator[World]:
    worker = Worker(Role.DECODE)
    async with way_to(kind, worker.decode) as way:
        session = await worker.session()
        world = World(worker, way, session, await worker.lease(session, PROMPT))
        yield world
        await world.let_go()
        await session.close()
        assert worker.idle() and worker.kv.unaccounted([]) == 0


@pytest.fixture(params=TRANSPORTS)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async for made in world_of(request.param):
        yield made


@pytest.fixture(params=STREAMS)
async def far(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async for made in world_of(request.param):
        yield made


@pytest.fixture(params=BESIDE)
async def buffers_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async for made in world_of(request.param):
        yield made


async def test_what_arrives_is_what_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer as a prefill brings it out, in many chunks."""
    monkeypatch.setattr(handoffs, "CHUNK_BYTES", 64)
    link = world.dial()
    seq = make_sequence(None, PROMPT)
    seq.blocks = BLOCKS
    handoff = Handoff(SOURCE, link, seq, world.grant.lease, FINGERPRINT, 0)
    sending = asyncio.create_task(handoff.run())
    for upto in (20, 50):
        for layer in range(2):
            handoff.layer_done(layer, upto)
            await asyncio.sleep(0)
    await sending
    await link.commit(sealed_commit(world.grant.lease, 5))
    await link.close()
    lease = world.worker.decode.table.check(world.grant.lease)
    for layer in range(2):
        for position in range(len(PROMPT)):
            there = token_at(world.worker.device_kv, layer, lease.seq.blocks, position)
            assert there == token_at(SOURCE, layer, BLOCKS, position)
    assert lease.seq.tokens[-1] == 5
    assert world.worker.decode.handoffs == {world.way.kind: 1}
    assert world.worker.decode.received == {world.way.kind: handoff.bytes_sent}


@pytest.mark.parametrize(
    ("harm", "error", "reason"),
    [
        (lambda c: replace(c, payload=bytes([c.payload[0] ^ 1]) + bytes(c.payload[1:])), CorruptChunk, "digest"),
        (lambda c: replace(c, payload=bytes(c.payload)[:-1]), CorruptChunk, "digest"),
        (lambda c: replace(c, digest=bytes(16)), CorruptChunk, "digest"),
        (lambda c: replace(c, first_layer=1, last_layer=3), CorruptChunk, "digest"),
        (lambda c: sealed(replace(c, payload=bytes(c.payload)[:-4])), CorruptChunk, "length"),
        (lambda c: sealed(replace(c, first_layer=1, last_layer=3)), CorruptChunk, "range"),
        (lambda c: sealed(replace(c, start=16, end=66)), CorruptChunk, "order"),
        (lambda c: sealed(replace(c, layout="another")), StaleLease, "layout"),
        (lambda c: sealed(replace(c, lease=replace(c.lease, epoch=7))), StaleLease, "epoch"),
        (lambda c: sealed(replace(c, lease=replace(c.lease, instance="past life"))), StaleLease, "instance"),
        (lambda c: sealed(replace(c, lease=replace(c.lease, lease="unknown"))), StaleLease, "lease"),
    ],
)
async def test_a_wrong_chunk_is_refused_by_name_and_counted(
    world: World, harm: Callable[[Chunk], Chunk], error: type[MillraceError], reason: str
) -> None:
    with pytest.raises(error) as raised:
        await world.push(harm(world.chunk()))
    assert raised.value.code == reason
    assert world.worker.decode.refused == {reason: 1}
    assert not world.worker.decode.handoffs and not world.worker.events
    await world.push(world.chunk())


@pytest.mark.parametrize("sent", [[(0, 20, range(2))], [(0, 50, range(1))]], ids=["tokens", "a layer"])
async def test_a_handoff_with_a_hole_is_refused(world: World, sent: list[tuple[int, int, range]]) -> None:
    with pytest.raises(CorruptChunk) as raised:
        await world.push(*(world.chunk(*each) for each in sent))
    assert raised.value.code == "incomplete" and world.worker.decode.refused == {"incomplete": 1}


async def test_a_chunk_sent_twice_is_refused(world: World) -> None:
    with pytest.raises(CorruptChunk) as raised:
        await world.push(world.chunk(0, 20), world.chunk(0, 20))
    assert raised.value.code == "order"


async def test_a_handoff_left_in_the_middle_leaves_nothing(world: World) -> None:
    link = world.dial()
    await link.push(world.chunk(0, 20))
    await link.close()
    await world.let_go()
    if world.way.lenders.offers:
        assert world.lendable() == 0
    world.session.cancel(world.grant.lease.lease)
    assert world.worker.idle()


async def test_a_sender_that_dies_leaves_its_lease_to_the_next(far: World) -> None:
    link = far.dial()
    assert isinstance(link, GrpcHandoff)
    await link.push(far.chunk(0, 20))
    link._call.cancel()  # what the receiver sees of a process that is gone
    await far.let_go()
    await link.close()
    if far.way.lenders.offers:
        assert far.lendable() == -1, "a write of the dead may still come: its buffers rest"
    fence = replace(far.grant.lease, epoch=1)
    far.grant = await far.session.advance(make_order(PROMPT, lease=fence))
    await far.push(far.chunk())


async def test_a_write_that_comes_late_is_found_by_the_digest(
    buffers_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that is overwritten after its chunk was announced: refused, and the next handoff is not harmed."""
    read = LentBuffers.read

    def late(lent: LentBuffers, index: int, length: int) -> bytes | memoryview:
        buffers_world.memory[:] ^= 1
        return read(lent, index, length)

    with monkeypatch.context() as patch:
        patch.setattr(LentBuffers, "read", late)
        with pytest.raises(CorruptChunk) as raised:
            await buffers_world.push(buffers_world.chunk())
    assert raised.value.code == "digest" and buffers_world.worker.decode.refused == {"digest": 1}
    await buffers_world.push(buffers_world.chunk())


async def test_what_was_read_out_of_a_buffer_stays_as_it_was_checked(buffers_world: World) -> None:
    lender = buffers_world.lender
    lent = lender.lend()
    read = lent.read(1, 100)
    buffers_world.memory[:] = 7
    assert read == bytes(100) and lent.read(1, 100) == bytes([7]) * 100
    assert lent.read(99, 1) == b"" == lent.read(0, 1 << 40), "what was not lent holds nothing"
    lent.give_back(settled=True)
    assert lent.read(1, 100) == b"", "it was given back"


def filler(number: int) -> Chunk:
    """A layer of 1,024 tokens as bench.sink takes them: 768 bytes each."""
    place = {"first_layer": 0, "last_layer": 1, "start": number * 1024, "end": (number + 1) * 1024}
    return sealed(Chunk(lease=lease_id(), layout="", payload=bytes(768 * 1024), digest=b"", **place))


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.thorough
async def test_a_receiver_that_is_killed_is_a_lost_worker(kind: str) -> None:
    """A real process, in the middle of a handoff."""
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "bench.sink", "2", "100000", kind],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    dialer = Dialer(kv_transport=kind)
    try:
        told = json.loads(await asyncio.to_thread(process.stdout.readline))
        offers = [
            TransportOffer(kind=name, details=base64.b64decode(text)) for name, text in told["transports"].items()
        ]
        link = dialer.dial(granted(told["address"], *offers))
        for number in range(8):
            await link.push(filler(number))
        process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(WorkerLost):
                while True:
                    await link.push(filler(9))
        await link.close()
    finally:
        process.kill()
        process.communicate()
        await dialer.close()
