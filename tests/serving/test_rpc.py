"""Calls over real gRPC on loopback: errors keep their type and their words, strangers are refused, broken is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from grpc import ChannelConnectivity, StatusCode, aio

from serving import rpc
from serving.errors import NEVER_SENT, InvalidRequest, MillraceError, Unauthorized, WorkerLost
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import INTERNAL, Caller, answering, asking, listen, server

KEY = "sesame"
OWN = {name: kind for name, kind in MillraceError.by_name.items() if kind.__module__ == "serving.errors"}


class Answers(stubs.PrefillServicer, stubs.RegistryServicer, stubs.DecodeServicer):
    """One door of each shape; all raise `error`, if there is one."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.after = 0  # replies of a stream before the error
        self.received = 0
        self.closed = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.beaten = asyncio.Event()

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: aio.ServicerContext) -> pb.HeartbeatReply:
        async with answering(context):
            self.beaten.set()
            await self.open.wait()
            if self.error is not None:
                raise self.error
            return pb.HeartbeatReply(router=request.status.name)

    async def Run(self, request: pb.PrefillOrder, context: aio.ServicerContext) -> AsyncIterator[pb.Prefilled]:
        async with answering(context):
            try:
                for number in range(self.after):
                    yield pb.Prefilled(cached_tokens=number)
                if self.error is not None:
                    raise self.error
            finally:
                self.closed.set()

    async def Push(
        self, requests: AsyncIterator[pb.PushMessage], context: aio.ServicerContext
    ) -> AsyncIterator[pb.PushReply]:
        async with answering(context):
            async for _ in requests:
                self.received += 1
                if self.error is not None:
                    raise self.error
            yield pb.PushReply(committed=True)


class World:
    def __init__(self, key: str | None):
        self.key = key
        self.answers = Answers()

    async def start(self) -> None:
        self.server = server(self.key)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        stubs.add_PrefillServicer_to_server(self.answers, self.server)
        stubs.add_RegistryServicer_to_server(self.answers, self.server)
        stubs.add_DecodeServicer_to_server(self.answers, self.server)
        await self.server.start()
        self.caller = Caller(self.address, self.key)

    async def stop(self) -> None:
        await self.caller.close()
        await self.server.stop(0)

    async def beat(self, caller: Caller | None = None) -> str:
        caller = caller or self.caller
        with asking(caller.address):
            stub = stubs.RegistryStub(caller.channel)
            reply = await stub.Heartbeat(
                pb.HeartbeatRequest(status=pb.WorkerStatus(name="me")), metadata=caller.metadata, timeout=10
            )
        return str(reply.router)

    async def run(self, caller: Caller | None = None) -> list[int]:
        caller = caller or self.caller
        found = []
        with asking(caller.address):
            async for message in stubs.PrefillStub(caller.channel).Run(pb.PrefillOrder(), metadata=caller.metadata):
                found.append(message.cached_tokens)  # noqa: PERF401
        return found

    async def push(self, caller: Caller | None = None) -> None:
        # What is on its way when the stream ends may hide why it ended: https://github.com/grpc/grpc/issues/36066
        last = 0 if caller is not None else 1 if self.answers.error is not None else None
        caller = caller or self.caller

        async def messages() -> AsyncIterator[pb.PushMessage]:
            for number in range(3):
                if number == last:
                    await asyncio.Event().wait()
                yield pb.PushMessage(chunk=pb.Chunk(payload=bytes(100)))

        with asking(caller.address):
            async for _ in stubs.DecodeStub(caller.channel).Push(messages(), metadata=caller.metadata):
                pass


@pytest.fixture(params=[None, KEY], ids=["open", "with a key"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World(request.param)
    await made.start()
    yield made
    await made.stop()


async def test_calls_of_every_shape_arrive(world: World) -> None:
    world.answers.after = 3
    assert await world.beat() == "me" and await world.run() == [0, 1, 2]
    await world.push()
    assert world.answers.received == 3


@pytest.mark.parametrize("kind", OWN.values(), ids=OWN)
@pytest.mark.parametrize("shape", ["beat", "run", "push"])
async def test_an_error_is_raised_here_as_it_was_there(world: World, kind: type[MillraceError], shape: str) -> None:
    world.answers.error = kind("what – ‚ü\nx", param="messages[0]", code="why", retry_after=1.5)
    with pytest.raises(kind) as raised:
        await getattr(world, shape)()
    assert type(raised.value) is kind and vars(raised.value) == vars(world.answers.error)


async def test_an_error_after_some_replies_is_raised_after_them(world: World) -> None:
    world.answers.error, world.answers.after = InvalidRequest("what", param="x"), 2
    found = []
    with pytest.raises(InvalidRequest), asking(world.address):
        stub = stubs.PrefillStub(world.caller.channel)
        async for message in stub.Run(pb.PrefillOrder(), metadata=world.caller.metadata):
            found.append(message.cached_tokens)  # noqa: PERF401
    assert found == [0, 1]


@pytest.mark.parametrize(("letter", "size"), [("x", 1000), ("x", 30_000), ("字", 30_000)])
async def test_an_error_may_have_much_to_say(world: World, letter: str, size: int) -> None:
    world.answers.error = InvalidRequest(letter * size, param="prompt")
    with pytest.raises(MillraceError) as raised:
        await world.beat()
    assert isinstance(raised.value, InvalidRequest), f"it became {type(raised.value).__name__}"


@pytest.mark.parametrize("shape", ["beat", "run", "push"])
@pytest.mark.parametrize("key", [None, "wrong", ""])
async def test_without_the_key_no_door_opens(shape: str, key: str | None) -> None:
    made = World(KEY)
    await made.start()
    stranger = Caller(made.address, key)
    try:
        with pytest.raises(Unauthorized):
            async with asyncio.timeout(60):  # through an open door, a push goes on
                await getattr(made, shape)(stranger)
    finally:
        await stranger.close()
        await made.stop()


async def test_only_what_may_hide_a_refusal_is_asked_about() -> None:
    made = World(KEY)
    await made.start()
    stranger, lost, hiding = (
        Caller(made.address, "wrong"),
        WorkerLost("gone", code="UNAVAILABLE"),
        WorkerLost("", code=INTERNAL),
    )
    assert await stranger.why(lost) is lost
    assert type(await stranger.why(hiding)) is Unauthorized
    assert await made.caller.why(hiding) is hiding
    await made.stop()
    assert await stranger.why(hiding) is hiding, "nobody answers"
    await stranger.close()


@pytest.mark.parametrize("shape", ["beat", "run", "push"])
async def test_nobody_there_is_a_lost_worker(world: World, shape: str) -> None:
    """Who also says that nothing of the call has reached it, also where there was a connection."""
    if shape != "run":
        await world.beat()
    await world.server.stop(0)
    async with asyncio.timeout(60):  # until the channel has heard of it
        while world.caller.channel.get_state() is ChannelConnectivity.READY:
            await asyncio.sleep(0.001)
    with pytest.raises(WorkerLost) as raised:
        await getattr(world, shape)()
    assert raised.value.code == NEVER_SENT


@pytest.mark.parametrize(
    ("details", "sent"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: Connection refused", False),
        ("errors resolving worker-0:8100: [address lookup failed]", False),
        ("Socket closed", True),
        ("recvmsg:Connection reset by peer", True),
        ("", True),
    ],
)
def test_what_grpc_says_tells_whether_a_call_was_sent(details: str, sent: bool) -> None:
    error = aio.AioRpcError(StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), details=details)
    with pytest.raises(WorkerLost) as raised, asking("peer"):
        raise error
    assert (raised.value.code != NEVER_SENT) == sent


async def test_a_call_that_is_broken_off_may_have_reached_its_worker(world: World) -> None:
    world.answers.open.clear()
    calling = asyncio.create_task(world.beat())
    await world.answers.beaten.wait()
    await world.server.stop(0)
    with pytest.raises(WorkerLost) as raised:
        await calling
    assert raised.value.code != NEVER_SENT


async def test_an_answer_that_takes_too_long_is_a_lost_worker(world: World) -> None:
    world.answers.open.clear()
    with pytest.raises(WorkerLost) as raised, asking(world.address):
        stub = stubs.RegistryStub(world.caller.channel)
        await stub.Heartbeat(pb.HeartbeatRequest(), metadata=world.caller.metadata, timeout=0.05)
    assert raised.value.code == "DEADLINE_EXCEEDED"


async def test_leaving_a_stream_tells_the_other_side(world: World) -> None:
    world.answers.after = 1_000_000
    call = stubs.PrefillStub(world.caller.channel).Run(pb.PrefillOrder(), metadata=world.caller.metadata)
    async for _ in call:
        break
    call.cancel()
    async with asyncio.timeout(60):
        await world.answers.closed.wait()


async def test_a_peer_that_answers_no_ping_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, or its host is gone: what it holds must not be held for ever. (Twenty times as fast.)"""
    hurried = [(name, value // 20 if name.endswith("_ms") else value) for name, value in rpc._OPTIONS]
    monkeypatch.setattr(rpc, "_OPTIONS", hurried)
    door = server()
    port = listen(door, "127.0.0.1", 0)
    await door.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04" + bytes(5))  # and an empty SETTINGS frame
    try:
        async with asyncio.timeout(60):
            while await reader.read(4096):  # it takes everything in, and says no more
                pass
    finally:
        writer.close()
        await door.stop(0)
