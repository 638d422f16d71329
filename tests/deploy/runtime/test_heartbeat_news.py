"""News in heartbeats: all of several routers hear of it soon, and it takes a bounded part of each."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from deploy.runtime import heartbeats as module
from deploy.runtime.heartbeats import Heartbeats
from serving.config import ClusterConfig, PlacementConfig
from serving.errors import InvalidRequest
from serving.proto import millrace_pb2 as pb
from serving.rpc import Caller
from tests.fakes.scripted_router import KEY, ScriptedRouter, beating, send, stop, until


async def test_news_is_told_to_all_of_several_routers_soon_and_not_too_often() -> None:
    one, two = ScriptedRouter([]), ScriptedRouter([])
    routers = f"{await one.start()}, {await two.start()}"
    heartbeats = beating(routers, interval=3600.0)
    running = asyncio.create_task(heartbeats.run())
    await until(lambda: (one.beats, two.beats) == (1, 1))
    heartbeats.news()
    await until(lambda: (one.beats, two.beats) == (2, 2))
    began = asyncio.get_running_loop().time()
    for _ in range(60):
        heartbeats.news()
        await asyncio.sleep(0.005)
    seconds = asyncio.get_running_loop().time() - began
    assert 3 <= one.beats <= 3 + seconds / module.NEWS_GAP
    heartbeats.news()  # it may fall into a heartbeat that is under way: then another one follows
    seen = one.beats, two.beats
    await until(lambda: one.beats > seen[0] and two.beats > seen[1])
    await stop(running)
    await asyncio.gather(one.server.stop(0), two.server.stop(0))


async def test_a_router_that_answers_slowly_is_told_of_news_less_often() -> None:
    """It has much to do, and hears of everything at the worker's turn in any case."""
    quick, slow = ScriptedRouter([]), SlowRouter([])
    routers = f"{await quick.start()}, {await slow.start()}"
    heartbeats = beating(routers, interval=3600.0)
    running = asyncio.create_task(heartbeats.run())
    await until(lambda: (quick.beats, slow.beats) == (1, 1))
    await asyncio.sleep(2 * SlowRouter.SECONDS)
    began = asyncio.get_running_loop().time()
    while quick.beats < 4:
        heartbeats.news()
        await asyncio.sleep(0.005)
    seconds = asyncio.get_running_loop().time() - began
    assert slow.beats <= 2 + seconds * module.NEWS_SHARE / SlowRouter.SECONDS
    await stop(running)
    await asyncio.gather(quick.server.stop(0), slow.server.stop(0))


class CrowdedRouter(ScriptedRouter):
    """Has very many workers."""

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: object) -> pb.HeartbeatReply:
        await super().Heartbeat(request, context)
        return pb.HeartbeatReply(workers=1_000_000)


async def test_a_router_of_very_many_workers_is_told_of_news_by_each_at_its_turn() -> None:
    few, many = ScriptedRouter([]), CrowdedRouter([])
    heartbeats = beating(f"{await few.start()}, {await many.start()}", interval=3600.0)
    running = asyncio.create_task(heartbeats.run())
    await until(lambda: (few.beats, many.beats) == (1, 1))
    while few.beats < 4:
        heartbeats.news()
        await asyncio.sleep(0.005)
    assert many.beats == 1
    await stop(running)
    await asyncio.gather(few.server.stop(0), many.server.stop(0))


@given(st.floats(1e-5, 10.0), st.integers(0, 100_000))
def test_all_workers_of_a_router_together_take_a_bounded_part_of_it(seconds: float, workers: int) -> None:
    gap = module.news_gap(seconds, workers)
    assert gap >= module.NEWS_GAP and workers * seconds / gap <= module.NEWS_LOAD * 1.001
    assert seconds / gap <= module.NEWS_SHARE * 1.001


async def test_a_router_that_does_not_answer_is_told_of_news_at_its_turn() -> None:
    """What refuses connections says so at once, and would be asked again and again."""
    one, two = ScriptedRouter([]), ScriptedRouter([])
    routers = [await one.start(), await two.start()]
    tried: list[str] = []

    async def counted(caller: Caller, seconds: float) -> pb.HeartbeatReply:
        tried.append(caller.address)
        if caller.address == routers[0] and tried.count(routers[0]) > 1:
            raise InvalidRequest("not this worker")
        return await send(caller, seconds)

    placement = PlacementConfig(heartbeat_interval=3600.0)
    heartbeats = Heartbeats(counted, ClusterConfig(routers=",".join(routers), cluster_key=KEY), placement)
    running = asyncio.create_task(heartbeats.run())
    await until(lambda: (one.beats, two.beats) == (1, 1))
    while two.beats < 4:
        heartbeats.news()
        await asyncio.sleep(0.005)
    assert tried.count(routers[0]) == 2
    await stop(running)
    await asyncio.gather(one.server.stop(0), two.server.stop(0))


class SlowRouter(ScriptedRouter):
    """Takes a while to answer."""

    SECONDS = 0.1

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: object) -> pb.HeartbeatReply:
        await asyncio.sleep(self.SECONDS)
        return await super().Heartbeat(request, context)


async def test_a_lone_router_is_told_at_its_turn() -> None:
    router = ScriptedRouter([])
    heartbeats = beating(await router.start(), interval=3600.0)
    running = asyncio.create_task(heartbeats.run())
    await until(lambda: router.beats == 1)
    heartbeats.news()
    await asyncio.sleep(3 * module.NEWS_GAP)
    assert router.beats == 1
    await stop(running)
    await router.server.stop(0)


async def test_news_before_the_first_heartbeat_harms_nothing() -> None:
    heartbeats = beating("127.0.0.1:1, 127.0.0.1:2")
    heartbeats.news()
