"""Heartbeats: sent to every router that answers; the pool's nodes are what any of them knows, told when they change."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deploy.runtime import heartbeats as module
from deploy.runtime.discovery import RouterDirectory, addresses, look_up, peers_of
from deploy.runtime.heartbeats import Heartbeats, RouterClocks
from serving.config import ClusterConfig, PlacementConfig
from serving.errors import InvalidRequest
from serving.grpc_tls import GrpcTls
from serving.messages import Role
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, answering, listen, server
from tests.certificates import Authority
from tests.fakes.clock import ManualClock
from tests.fakes.loop_time import passing_time
from tests.fakes.scripted_router import KEY, ScriptedRouter, beating, send, stop, until


async def test_the_pool_is_what_any_router_knows_and_what_was_set() -> None:
    one, two = ScriptedRouter(["b:1", "a:1"]), ScriptedRouter(["c:1", "a:1"])
    told: list[list[str]] = []
    routers = f"{await one.start()}, {await two.start()}"
    heartbeats = beating(routers, fixed_nodes=["z:1"], on_pool_nodes=told.append)
    running = asyncio.create_task(heartbeats.run())
    await until(lambda: bool(told) and told[-1] == ["a:1", "b:1", "c:1", "z:1"])
    assert told[0] == ["z:1"] and len(told) == 3, "once as it was set, then once for each router"
    await until(lambda: one.beats > 5 and two.beats > 5)
    assert len(told) == 3, "nothing changed, so nothing was told"
    await two.server.stop(0)
    one.nodes = []
    await until(lambda: len(told) > 3)
    assert told[3:] == [["a:1", "c:1", "z:1"]], "a router that is away keeps its last word"
    await stop(running)
    await one.server.stop(0)


async def test_a_router_that_refuses_does_not_keep_the_others_from_hearing(caplog: Any) -> None:
    stranger, friend = ScriptedRouter(["x:1"]), ScriptedRouter(["a:1"])
    told: list[list[str]] = []
    routers = f"{await stranger.start('another key')},{await friend.start()}"
    running = asyncio.create_task(beating(routers, on_pool_nodes=told.append).run())
    await until(lambda: friend.beats > 2)
    assert told == [["a:1"]] and stranger.beats == 0
    assert "refuses us" in caplog.text
    await stop(running)
    await stranger.server.stop(0)
    await friend.server.stop(0)


@pytest.mark.parametrize("gone", [True, False])
async def test_whose_parent_is_gone_is_told_so(gone: bool) -> None:
    router, orphaned = ScriptedRouter([]), asyncio.Event()
    routers = await router.start()
    parent = os.getppid() + (1 if gone else 0)
    running = asyncio.create_task(beating(routers, parent=parent, orphaned=orphaned.set).run())
    await until(lambda: router.beats > 2)
    assert orphaned.is_set() == gone
    await stop(running)
    await router.server.stop(0)


def test_addresses_are_read_as_people_write_them() -> None:
    assert addresses(" a:1, b:2 ,,") == ["a:1", "b:2"] and addresses(None) == addresses("") == []


class SilentRouter(ScriptedRouter):
    """Takes heartbeats and never answers."""

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: object) -> pb.HeartbeatReply:
        self.beats += 1
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_dead_router_does_not_slow_the_heartbeats_to_the_others() -> None:
    """They go on, although it has not answered its first one yet."""
    dead, friend = SilentRouter([]), ScriptedRouter([])

    async def send_patiently(caller: Caller, seconds: float) -> pb.HeartbeatReply:
        return await send(caller, 600.0)

    cluster = ClusterConfig(routers=f"{await dead.start()},{await friend.start()}", cluster_key=KEY)
    heartbeats = Heartbeats(send_patiently, cluster, PlacementConfig(heartbeat_interval=0.01))
    running = asyncio.create_task(heartbeats.run())
    await until(lambda: dead.beats == 1)
    before = friend.beats
    await until(lambda: friend.beats > before + 20)
    assert dead.beats == 1
    await stop(running)
    for router in (dead, friend):
        await router.server.stop(0)


async def test_a_refusal_is_told_once_and_the_router_asked_again(caplog: Any) -> None:
    class Refusing(ScriptedRouter):
        async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
            async with answering(context):
                self.beats += 1
                if self.beats <= 5:
                    raise InvalidRequest("worker w speaks protocol 1 and this router 2", code="protocol")
            return pb.HeartbeatReply(pool_nodes=["a:1"])

    router, told = Refusing([]), []
    running = asyncio.create_task(beating(await router.start(), on_pool_nodes=told.append).run())
    await until(lambda: bool(told))
    assert caplog.text.count("refuses us: worker w speaks protocol 1") == 1 and router.beats >= 6
    await stop(running)
    await router.server.stop(0)


async def test_a_mistake_of_ours_ends_no_heartbeats() -> None:
    router, restarts, calls = ScriptedRouter([]), Counter[str](), []

    async def careless(caller: Caller, seconds: float) -> pb.HeartbeatReply:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("dictionary changed size during iteration")
        return await send(caller, seconds)

    cluster = ClusterConfig(routers=await router.start(), cluster_key=KEY)
    heartbeats = Heartbeats(careless, cluster, PlacementConfig(heartbeat_interval=0.01), restarts=restarts)
    running = asyncio.create_task(heartbeats.run())
    await until(lambda: router.beats > 5)
    assert restarts == {"heartbeats": 1}
    await stop(running)
    await router.server.stop(0)


def test_a_routers_clock_goes_on_with_ours() -> None:
    clock = ManualClock()
    clocks = RouterClocks(clock)
    assert clocks.now("a:1") is None
    clocks.told("a:1", 5000.0)
    clock.now += 0.75
    assert clocks.now("a:1") == 5000.75
    clocks.forget("a:1")
    assert clocks.now("a:1") is None, "who answers next may be another, with another clock"


async def test_a_router_of_another_authority_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")
    serving = GrpcTls(theirs.files(tmp_path / "theirs").security())
    door = server(KEY, serving)
    router = ScriptedRouter([])
    stubs.add_RegistryServicer_to_server(router, door)
    address = f"127.0.0.1:{listen(door, '127.0.0.1', 0, serving)}"
    await door.start()
    heartbeats = beating(address, tls=GrpcTls(ours.files(tmp_path / "ours").security()))
    for _ in range(3):
        await heartbeats.once()
    assert caplog.text.count("CERTIFICATE_VERIFY_FAILED") == 1 and router.beats == 0
    await stop(asyncio.create_task(heartbeats.run()))
    await door.stop(0)


class Names:
    """A name server whose answers a test changes; None: it does not answer."""

    def __init__(self, *found: str):
        self.found: list[str] | None = list(found)

    async def look_up(self, host: str, port: int) -> list[str]:
        if self.found is None:
            raise OSError("no such name")
        return self.found


async def test_every_address_of_a_name_is_a_router_until_it_is_lost_and_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the pods of a headless service come and go."""
    monkeypatch.setattr(module, "LOOKUP_SECONDS", 0.01)
    one, two = ScriptedRouter(["a:1"]), ScriptedRouter(["b:1"])
    first, second = await one.start(), await two.start()
    names, told = Names(first), list[list[str]]()
    cluster = ClusterConfig(routers="dns:routers:8100", cluster_key=KEY)
    placement = PlacementConfig(heartbeat_interval=0.01, heartbeat_timeout=600.0)
    heartbeats = Heartbeats(send, cluster, placement, on_pool_nodes=told.append)
    heartbeats.directory.lookup = names.look_up
    running = asyncio.create_task(heartbeats.run())
    await until(lambda: one.beats > 2)
    assert two.beats == 0
    names.found = [first, second]
    await until(lambda: two.beats > 2 and told[-1:] == [["a:1", "b:1"]])
    names.found = None
    seen = one.beats, two.beats
    await until(lambda: one.beats > seen[0] + 2 and two.beats > seen[1] + 2)
    names.found, let_pass = [second], passing_time()
    for _ in range(4):
        before = one.beats
        await until(lambda: one.beats > before + 2)  # noqa: B023
        let_pass(400.0)
    before = one.beats
    await until(lambda: one.beats > before + 2)
    assert told[-1] == ["a:1", "b:1"], "it answers, so it may have requests with us"
    await one.server.stop(0)
    async with asyncio.timeout(60 + 1e6):  # of the loop's clock
        while told[-1] != ["b:1"]:  # an answer that was on its way may be heard after that time
            let_pass(601.0)
            await asyncio.sleep(0.02)
    assert list(heartbeats._callers) == [second] == list(heartbeats._answered)
    await stop(running)
    await two.server.stop(0)


async def test_named_routers_stay_whatever_names_are_looked_up() -> None:
    names = Names("10.0.0.7:8100", "x:8100")
    directory = RouterDirectory("x:8100, dns:routers.default.svc:8100", names.look_up)
    assert await directory.now() == ["x:8100", "10.0.0.7:8100"]
    names.found = []
    assert await directory.now() == ["x:8100"]
    assert peers_of("x:8100, dns:routers:8100") == ["x:8100", "routers:8100"]


async def test_a_name_has_all_its_addresses() -> None:
    assert await look_up("127.0.0.1", 81) == ["127.0.0.1:81"] and await look_up("::1", 81) == ["[::1]:81"]


async def test_a_name_that_is_looked_up_for_long_does_not_keep_the_others_from_it() -> None:
    asked, answer = list[str](), asyncio.Event()

    async def slowly(host: str, port: int) -> list[str]:
        asked.append(host)
        await answer.wait()
        return [f"{host}:{port}"]

    directory = RouterDirectory("dns:slow:1, dns:[::1]:2", slowly)
    looking = asyncio.create_task(directory.now())
    await until(lambda: asked == ["slow", "::1"])
    answer.set()
    assert await looking == ["slow:1", "::1:2"]


@pytest.mark.parametrize(
    "named",
    ["dns:routers", "dns::8100", "dns:routers:http", "dns:a..b:1", f"dns:{'a' * 64}:1", "dns:a:0", "dns:a:65536"],
)
def test_a_name_without_a_port_is_refused(named: str) -> None:
    with pytest.raises(ValueError, match="a name and a port"):
        RouterDirectory(named)


class KnowingRouter(ScriptedRouter):
    """Says which role nobody would serve without a worker."""

    def __init__(self, lacking: str):
        super().__init__([])
        self.lacking = lacking

    async def Without(self, request: pb.WithoutRequest, context: object) -> pb.WithoutReply:
        return pb.WithoutReply(role=self.lacking if request.worker == "w" else "")


async def test_one_router_that_would_lack_a_role_is_enough_and_those_that_do_not_say_count_for_nothing() -> None:
    older, content, poor = ScriptedRouter([]), KnowingRouter(""), KnowingRouter("decode")
    addresses = [await router.start() for router in (older, content, poor)]
    quiet, told = (beating(",".join(asked), interval=60.0) for asked in (addresses[:2], addresses))
    running = [asyncio.create_task(each.run()) for each in (quiet, told)]
    try:
        async with asyncio.timeout(60):
            assert await quiet.lacking("w") is None
            assert await told.lacking("w") is Role.DECODE and await told.lacking("v") is None
    finally:
        for task in running:
            await stop(task)
        for router in (older, content, poor):
            await router.server.stop(None)
