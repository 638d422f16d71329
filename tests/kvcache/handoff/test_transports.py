"""The transports behind one seam: what reaches a receiver, what comes back, and nothing left of a broken one."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections import Counter
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvcache.handoff import grpc_stream
from kvcache.handoff.chunk import Chunk, Commit, sealed_commit
from kvcache.handoff.grpc_stream import WINDOW, GrpcHandoff
from kvcache.handoff.local import LOCAL, LocalHandoff
from kvcache.transfer.lent_memory import MemoryLenders, TransferUnavailable
from kvcache.transfer.shared_memory import DETAILS, Segment, SharedMemoryLender, SharedMemoryWriters
from serving.errors import CorruptChunk, InvalidRequest, MillraceError, StaleLease, WorkerLost
from serving.links import HandoffLink
from serving.messages import LeaseId, TransportOffer
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from tests.fakes.sequences import lease_id
from tests.kvcache.reaching import BESIDE, STREAMS, TRANSPORTS, Way, granted, needs_nixl, way_to

MIB = 1 << 20
STRANGE = "another"  # a generation that is refused


class Taking:
    """The receiving half of a decode worker: remembers, refuses when told to, stops taking while `open` is clear."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.commits: list[Commit] = []
        self.via: Counter[str] = Counter()
        self.refuse: MillraceError | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.receiving = 0  # kept by the service
        self.lenders = MemoryLenders()

    async def begin(self, fence: LeaseId | None, generation: str) -> int:
        if generation == STRANGE:
            raise StaleLease("KV of another generation", code="generation")
        return 0

    async def receive(self, chunk: Chunk, via: str = LOCAL) -> None:
        await self.open.wait()
        if self.refuse is not None:
            raise self.refuse
        self.chunks.append(chunk)
        self.via[via] += 1

    async def commit(self, commit: Commit, via: str = LOCAL) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.commits.append(commit)
        self.via[via] += 1

    async def let_go(self) -> None:
        """Wait until no handoff is being received."""
        async with asyncio.timeout(60):
            while self.receiving:
                await asyncio.sleep(0.001)


@pytest.fixture
def taking() -> Taking:
    return Taking()


@pytest.fixture(params=TRANSPORTS)
async def way(request: pytest.FixtureRequest, taking: Taking) -> AsyncIterator[Way]:
    async with way_to(request.param, taking) as made:
        yield made


@pytest.fixture(params=STREAMS)
async def stream(request: pytest.FixtureRequest, taking: Taking) -> AsyncIterator[Way]:
    async with way_to(request.param, taking) as made:
        yield made
        await taking.let_go()


def chunk(number: int, size: int = 10) -> Chunk:
    return Chunk(
        lease=lease_id(epoch=number),
        layout="layout",
        first_layer=number,
        last_layer=number + 1,
        start=2,
        end=9,
        payload=bytes([number]) * size,
        digest=bytes(16),
    )


async def until_stuck(pushed: list[int]) -> None:
    """Wait until no more is taken for a while: all that may wait waits."""
    unchanged, before = 0, 0
    async with asyncio.timeout(60):
        while unchanged < 20:
            await asyncio.sleep(0.01)
            unchanged = unchanged + 1 if 0 < len(pushed) == before else 0
            before = len(pushed)


async def push_all(link: HandoffLink, pushed: list[int], size: int = MIB) -> None:
    for number in range(100):
        await link.push(chunk(number, size))
        pushed.append(number)


async def test_chunks_arrive_whole_in_order_and_before_the_commit(way: Way, taking: Taking) -> None:
    link = way.dial()
    assert isinstance(link, LocalHandoff if way.kind == "local" else GrpcHandoff)
    sent = [chunk(number, 10 + number) for number in range(3 * WINDOW)]
    for one in sent:
        await link.push(one)
    await link.commit(sealed_commit(lease_id(epoch=3), 17, waited=0.25))
    await link.close()
    assert taking.chunks == sent and taking.commits == [sealed_commit(lease_id(epoch=3), 17, waited=0.25)]
    assert taking.via == {way.kind: len(sent) + 1}, "all of it by the transport that was chosen"


async def test_a_large_chunk_arrives_whole(way: Way, taking: Taking) -> None:
    """One larger than a buffer goes over the stream, whatever else there is."""
    link = way.dial()
    sent = [chunk(1, 3 * MIB), chunk(2, MIB), chunk(3, 2 * MIB)]
    for one in sent:
        await link.push(one)
    await link.commit(sealed_commit(lease_id(), 1))
    await link.close()
    assert taking.chunks == sent
    assert taking.via["grpc"] == {"local": 0, "grpc": 4}.get(way.kind, 1)


async def test_a_sender_of_another_generation_is_refused_before_anything_is_sent(
    way: Way, taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_stream, "PARTING_SECONDS", 600.0)
    link = way.dialer.dial(granted(way.address, *way.lenders.offers), STRANGE)
    with pytest.raises(StaleLease) as raised:
        await link.begin()
    assert raised.value.code == "generation"
    async with asyncio.timeout(60):  # else it would wait for an end that does not come
        await link.close()
    await taking.let_go()
    assert taking.chunks == []


@pytest.mark.parametrize("error", [CorruptChunk("harmed", code="digest"), StaleLease("over", code="epoch")])
async def test_a_refusal_comes_back_as_what_it_is(way: Way, taking: Taking, error: MillraceError) -> None:
    taking.refuse = error
    link = way.dial()
    with pytest.raises(type(error)) as raised:
        await link.push(chunk(0))
        await link.commit(sealed_commit(lease_id(), 1))
    assert raised.value.code == error.code and taking.commits == []
    await link.close()


async def test_a_refusal_arrives_whole_though_more_is_on_its_way(stream: Way, taking: Taking) -> None:
    """Forty times over, with chunks that fill what the sockets hold: one in flight must not hide the reason."""
    taking.refuse = CorruptChunk("harmed", code="digest")
    for _ in range(40):
        link = stream.dial()
        with pytest.raises(CorruptChunk) as raised:
            await push_all(link, [], 300_000)
        assert raised.value.code == "digest"
        await link.close()
    assert taking.chunks == []


async def test_after_a_refusal_nothing_more_is_taken(stream: Way, taking: Taking) -> None:
    taking.refuse = CorruptChunk("harmed", code="digest")
    link = stream.dial()
    with pytest.raises(CorruptChunk):
        await push_all(link, [], 10)
    taking.refuse = None
    with pytest.raises(CorruptChunk):
        await link.commit(sealed_commit(lease_id(), 1))
    await link.close()
    assert taking.chunks == [] and taking.commits == []


async def test_a_refused_commit_comes_back(way: Way, taking: Taking) -> None:
    link = way.dial()
    await link.push(chunk(0))
    async with asyncio.timeout(60):
        while not taking.chunks:
            await asyncio.sleep(0.001)
    taking.refuse = CorruptChunk("KV is missing", code="incomplete")
    with pytest.raises(CorruptChunk, match="missing"):
        await link.commit(sealed_commit(lease_id(), 1))
    await link.close()


async def test_a_receiver_that_goes_away_is_a_lost_worker(stream: Way, taking: Taking) -> None:
    taking.open.clear()
    link = stream.dial()
    await link.push(chunk(0))
    await stream.server.stop(0)
    with pytest.raises(WorkerLost):
        await push_all(link, [])
    await link.close()


async def test_nobody_there_is_a_lost_worker(stream: Way) -> None:
    await stream.server.stop(0)
    link = stream.dial()
    with pytest.raises(WorkerLost):
        await link.push(chunk(0))
    await link.close()


async def test_a_slow_receiver_holds_the_sender_up(stream: Way, taking: Taking) -> None:
    """Whatever the sockets hold, no more than the window waits in memory."""
    taking.open.clear()
    link = stream.dial()
    pushed: list[int] = []
    pushing = asyncio.create_task(push_all(link, pushed))
    await until_stuck(pushed)
    assert len(pushed) < 100 and not pushing.done()
    taking.open.set()
    async with asyncio.timeout(60):
        await pushing
        await link.commit(sealed_commit(lease_id(), 1))
    await link.close()
    assert [one.first_layer for one in taking.chunks] == list(range(100))


async def test_nothing_is_left_of_a_push_that_was_cancelled(stream: Way, taking: Taking) -> None:
    before = asyncio.all_tasks()
    taking.open.clear()
    link = stream.dial()
    pushed: list[int] = []
    pushing = asyncio.create_task(push_all(link, pushed))
    await until_stuck(pushed)
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    taking.open.set()
    await link.close()
    await taking.let_go()
    assert taking.commits == []
    left = [task for task in asyncio.all_tasks() - before if "push" in task.get_name() or "put" in repr(task)]
    for task in left:
        task.cancel()
    gc.collect()
    assert left == []


async def test_one_channel_serves_all_handoffs_to_an_address(stream: Way) -> None:
    first, second = stream.dial(), stream.dial()
    assert isinstance(first, GrpcHandoff) and isinstance(second, GrpcHandoff)
    assert first.caller is second.caller
    await first.close()
    await second.push(chunk(1))
    await second.commit(sealed_commit(lease_id(), 1))
    await second.close()


@pytest.mark.parametrize(
    "messages",
    [
        [pb.PushMessage(chunk=pb.Chunk(payload=b"early"))],
        [pb.PushMessage(hello=pb.PushHello())] * 2,
        [pb.PushMessage(hello=pb.PushHello()), pb.PushMessage()],
    ],
    ids=["no hello", "two of them", "an empty message"],
)
async def test_a_sender_who_does_not_keep_to_the_order_is_refused(
    taking: Taking, messages: list[pb.PushMessage]
) -> None:
    async with way_to("grpc", taking) as way:
        link = way.dial()
        assert isinstance(link, GrpcHandoff)
        call = stubs.DecodeStub(link.caller.channel).Push(iter(messages))
        replies = [reply async for reply in call]
        await link.close()
    assert replies[-1].error.kind == InvalidRequest.__name__ and taking.chunks == []


async def test_an_offer_of_what_is_not_here_is_passed_over(taking: Taking) -> None:
    async with way_to("grpc", taking) as way:
        strange = TransportOffer(kind="pigeon", details=b"coo")
        link = way.dialer.dial(granted(way.address, strange))
        await link.push(chunk(1))
        await link.commit(sealed_commit(lease_id(), 1))
        await link.close()
    assert taking.via == {"grpc": 2}


@needs_nixl
async def test_what_nixl_cannot_reach_goes_over_grpc(taking: Taking, caplog: pytest.LogCaptureFixture) -> None:
    """The offer is broken: said once, and the handoff goes on."""
    async with way_to("nixl", taking) as way:
        link = way.dialer.dial(granted(way.address, TransportOffer(kind="nixl", details=b"nonsense")))
        for number in range(3):
            await link.push(chunk(number))
        await link.commit(sealed_commit(lease_id(), 1))
        await link.close()
    assert taking.via == {"grpc": 4}
    assert sum("over gRPC" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("kind", BESIDE)
async def test_more_handoffs_than_there_are_buffers_for_go_over_grpc(kind: str, taking: Taking) -> None:
    async with way_to(kind, taking) as way:
        lender = way.lenders.of(kind)
        assert lender is not None
        room = lender.lending.parts
        links = [way.dial() for _ in range(room + 2)]
        for number, link in enumerate(links):
            await link.push(chunk(number))
        for link in links:
            await link.commit(sealed_commit(lease_id(), 1))
            await link.close()
        assert taking.via == {kind: 2 * room, "grpc": 4}
        link = way.dial()
        await link.push(chunk(9))
        await link.commit(sealed_commit(lease_id(), 1))
        await link.close()
    assert taking.via == {kind: 2 * room + 2, "grpc": 4}, "those that ended gave theirs back"


def offer_of(segment: Segment, **fields: object) -> TransportOffer:
    """The segment's offer with some fields of its details changed."""
    names = ("process", "descriptor", "size", "secret")
    details = dict(zip(names, DETAILS.unpack(segment.details), strict=True)) | fields
    return TransportOffer(kind="shm", details=DETAILS.pack(*(details[name] for name in names)))


@pytest.mark.parametrize("harm", ["nonsense", "another process", "another file", "another size", "another secret"])
async def test_memory_that_is_not_shared_is_passed_over(harm: str, taking: Taking) -> None:
    """As it is on another host or in another container: the numbers lead nowhere, or to something else."""
    async with way_to("shm", taking) as way:
        lender = way.lenders.of("shm")
        assert isinstance(lender, SharedMemoryLender)
        segment, before = lender.segment, lender.segment.memory.copy()
        with tempfile.TemporaryFile() as file:
            file.truncate(len(before))
            offers = {
                "nonsense": TransportOffer(kind="shm", details=b"nonsense"),
                "another process": offer_of(segment, process=2**31),
                "another file": offer_of(segment, descriptor=file.fileno()),
                "another size": offer_of(segment, size=len(before) - 1),
                "another secret": offer_of(segment, secret=bytes(32)),
            }
            link = way.dialer.dial(granted(way.address, offers[harm]))
            await link.push(chunk(1))
            await link.commit(sealed_commit(lease_id(), 1))
            await link.close()
            file.seek(0)
            assert not any(file.read())
        assert np.array_equal(segment.memory, before), "nothing was written where it does not belong"
    assert taking.via == {"grpc": 2}


async def test_a_write_outside_of_the_shared_memory_is_not_made(taking: Taking) -> None:
    async with way_to("shm", taking) as way:
        writers = SharedMemoryWriters()
        writer = writers.writer(way.lenders.offers[0])
        lender = way.lenders.of("shm")
        assert isinstance(lender, SharedMemoryLender)
        whole = len(lender.segment.memory)
        for address in (0, 1, whole - 3, whole, 1 << 62):
            with pytest.raises(TransferUnavailable):
                await writer.write(0, address, b"1234")
        await writer.write(0, whole - 4, b"1234")
        assert await writer.settle()
        with pytest.raises(TransferUnavailable):
            await writer.write(0, whole - 4, b"1234")
    assert bytes(lender.segment.memory[-4:]) == b"1234"
