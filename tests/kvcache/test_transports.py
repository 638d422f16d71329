"""The transports behind one seam: what reaches a receiver, what comes back, and nothing left of a broken one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
from grpc import aio

from decode.service import DecodeService
from kvcache.chunk import Chunk
from kvcache.transports import WINDOW, Dialer, GrpcHandoff, LocalHandoff
from serving.errors import CorruptChunk, MillraceError, StaleLease, WorkerLost
from serving.links import HandoffLink
from serving.messages import LeaseId
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import server
from tests.kvcache.sequences import lease_id


class Receiver:
    """The receiving half of a decode worker: remembers, refuses when told to, stops taking while `open` is clear."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.commits: list[tuple[LeaseId, int]] = []
        self.refuse: MillraceError | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.receiving = 0  # kept by the service

    async def receive(self, chunk: Chunk) -> None:
        await self.open.wait()
        if self.refuse is not None:
            raise self.refuse
        self.chunks.append(chunk)

    async def commit(self, fence: LeaseId, first_token: int) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.commits.append((fence, first_token))


class World:
    """A receiver, and a dialer that reaches it in process or over a real stream on loopback."""

    def __init__(self, kind: str):
        self.kind = kind
        self.receiver = Receiver()
        self.dialer = Dialer()

    async def start(self) -> None:
        self.address = "local:decode"
        if self.kind == "local":
            self.dialer.local[self.address] = self.receiver
            return
        self.server: aio.Server = server()
        port = self.server.add_insecure_port("127.0.0.1:0")
        service = DecodeService(self.receiver)  # type: ignore[arg-type]
        stubs.add_DecodeServicer_to_server(service, self.server)
        await self.server.start()
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self.dialer.close()
        if self.kind == "grpc":
            await self.server.stop(0)


@pytest.fixture(params=["local", "grpc"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World(request.param)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def grpc_world() -> AsyncIterator[World]:
    made = World("grpc")
    await made.start()
    yield made
    await made.stop()


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


def dial(world: World) -> HandoffLink:
    return world.dialer.dial(world.address)


async def until_stuck(link: HandoffLink) -> None:
    """Wait until the window is full and stays so: the sockets take no more."""
    assert isinstance(link, GrpcHandoff)
    full_for = 0
    while full_for < 10:
        await asyncio.sleep(0.01)
        full_for = full_for + 1 if link._messages.full() else 0


async def over(link: HandoffLink) -> None:
    """Wait until the stream has ended: what is on its way at that moment may hide why."""
    assert isinstance(link, GrpcHandoff)
    await asyncio.wait([link._call])


async def test_chunks_arrive_whole_in_order_and_before_the_commit(world: World) -> None:
    link = dial(world)
    assert isinstance(link, LocalHandoff if world.kind == "local" else GrpcHandoff)
    sent = [chunk(number) for number in range(2 * WINDOW)]
    for one in sent:
        await link.push(one)
    await link.commit(lease_id(epoch=3), 17)
    await link.close()
    assert world.receiver.chunks == sent
    assert world.receiver.commits == [(lease_id(epoch=3), 17)]


@pytest.mark.parametrize("error", [CorruptChunk("harmed", code="digest"), StaleLease("over", code="epoch")])
async def test_a_refusal_comes_back_as_what_it_is(world: World, error: MillraceError) -> None:
    world.receiver.refuse = error
    link = dial(world)
    with pytest.raises(type(error)) as raised:
        await link.push(chunk(0))
        await over(link)
        await link.push(chunk(1))
    assert raised.value.code == error.code
    await link.close()


async def test_a_refused_commit_comes_back(world: World) -> None:
    link = dial(world)
    await link.push(chunk(0))
    world.receiver.refuse = CorruptChunk("KV is missing", code="incomplete")
    with pytest.raises(CorruptChunk, match="missing"):
        await link.commit(lease_id(), 1)
    await link.close()


async def test_a_receiver_that_goes_away_is_a_lost_worker(grpc_world: World) -> None:
    grpc_world.receiver.open.clear()
    link = dial(grpc_world)
    await link.push(chunk(0))
    await grpc_world.server.stop(0)
    with pytest.raises(WorkerLost):
        for number in range(100):
            await link.push(chunk(number))
    await link.close()


async def test_a_slow_receiver_holds_the_sender_up(grpc_world: World) -> None:
    """Whatever the sockets hold, no more than the window waits in memory."""
    grpc_world.receiver.open.clear()
    link = dial(grpc_world)
    pushed = 0

    async def push_all() -> None:
        nonlocal pushed
        for number in range(100):
            await link.push(chunk(number, 1 << 20))
            pushed += 1

    pushing = asyncio.create_task(push_all())
    await until_stuck(link)
    assert pushed < 100 and not pushing.done()
    grpc_world.receiver.open.set()
    await pushing
    await link.commit(lease_id(), 1)
    await link.close()
    assert len(grpc_world.receiver.chunks) == 100


async def test_nothing_is_left_of_a_push_that_was_cancelled(grpc_world: World) -> None:
    grpc_world.receiver.open.clear()
    link = dial(grpc_world)
    before = asyncio.all_tasks()

    async def push_all() -> None:
        for number in range(100):
            await link.push(chunk(number, 1 << 20))

    pushing = asyncio.create_task(push_all())
    await until_stuck(link)
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    await link.close()
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() - before if "put" in repr(task.get_coro())]
    for task in left:
        task.cancel()
    gc.collect()
    assert left == []


async def test_one_channel_serves_all_handoffs_to_an_address(grpc_world: World) -> None:
    first, second = dial(grpc_world), dial(grpc_world)
    assert isinstance(first, GrpcHandoff) and isinstance(second, GrpcHandoff)
    assert first.caller is second.caller
    await first.close()
    await second.push(chunk(1))
    await second.commit(lease_id(), 1)
    await second.close()
