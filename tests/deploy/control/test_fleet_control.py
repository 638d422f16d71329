"""What a front refuses its controllers: the last of a role, a second flip, and a claim without an end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from deploy.autoscaler.actuator import ActuatorError
from deploy.autoscaler.by_router import RouterActuator
from deploy.control.fleet_control import HELD, LONGEST_CLAIM, FleetControl
from deploy.control.service import ControlService
from router.fleet import Fleet, RouterConfig
from serving.errors import InvalidRequest, Unavailable
from serving.messages import Role, WorkerStatus
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import listen, server
from tests.fakes.clock import ManualClock
from tests.flow.flipping import NothingBelow
from tests.router.scripted import make_status

WORKERS = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


class KeptBelow(NothingBelow):
    """Every worker is kept running here, and takes its time to leave."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[str] = []
        self.more: list[Role] = []

    def roles(self) -> dict[str, Role]:
        return {name: role for name, role in WORKERS.items() if name not in self.gone}

    def leaving(self) -> Sequence[str]:
        return self.gone

    def add(self, role: Role) -> None:
        self.more.append(role)

    def let_go(self, name: str) -> None:
        self.gone.append(name)


class Town:
    """A front of one prefill and two decode workers; a flip takes until `done` is set."""

    def __init__(self) -> None:
        self.clock, self.below = ManualClock(), KeptBelow()
        self.begun, self.done = asyncio.Event(), asyncio.Event()
        self.fleet = Fleet(RouterConfig(), lambda status: pytest.fail("nobody is asked"), self.clock)
        self.control = FleetControl(self.fleet, self.below, self._flip)
        for name, role in WORKERS.items():
            self.fleet.heartbeat(make_status(name, role))

    async def _flip(self, status: WorkerStatus, role: Role, seconds: float | None) -> str:
        self.begun.set()
        await self.done.wait()
        return "another life"

    def last(self, name: str) -> None:
        with pytest.raises(Unavailable, match=f"{name} stays decode: without it no worker would decode"):
            self.control.drain(name)


async def test_of_two_that_are_let_go_at_once_the_last_stays() -> None:
    """The first has not yet said that it drains."""
    town = Town()
    town.control.drain("decode-0")
    town.last("decode-1")
    with pytest.raises(Unavailable, match="decode-1 stays decode"):
        await town.control.flip("decode-1", Role.PREFILL)
    assert town.below.gone == ["decode-0"]


async def test_a_flip_goes_on_when_who_asked_for_it_has_left() -> None:
    town = Town()
    asking = asyncio.create_task(town.control.flip("decode-0", Role.PREFILL))
    await town.begun.wait()
    asking.cancel()
    await asyncio.wait([asking])
    town.last("decode-1")
    with pytest.raises(Unavailable, match="decode-0 flips to prefill: wait until it serves"):
        await town.control.flip("decode-1", Role.PREFILL)
    town.done.set()
    while not town.below.told:
        await asyncio.sleep(0)
    assert town.below.told == [("decode-0", Role.PREFILL)], "should it die, it begins in its new role"


async def test_a_claim_runs_out() -> None:
    town = Town()
    for wrong in (math.inf, math.nan, -1.0, LONGEST_CLAIM + 1):
        with pytest.raises(InvalidRequest, match="a claim of"):
            town.control.claim("one", wrong)
    with pytest.raises(InvalidRequest, match="a claim of nobody"):
        town.control.claim("", 60.0)
    town.control.claim("one", 60.0)
    with pytest.raises(Unavailable, match="one controls these workers"):
        town.control.claim("two", 60.0)
    town.clock.now += 60.0
    town.control.claim("two", 60.0)


async def test_beside_the_one_who_controls_nobody_adds_drains_or_flips() -> None:
    town, key = Town(), "the cluster's"
    town.done.set()
    door = server(key)
    stubs.add_ControlServicer_to_server(ControlService(town.control), door)
    address = f"127.0.0.1:{listen(door, '127.0.0.1', 0)}"
    await door.start()
    one, two = RouterActuator(address, key, "one"), RouterActuator(address, key, "two")
    try:
        async with asyncio.timeout(60):
            assert await one.held() and not await two.held()
            for refused in (two.add(Role.DECODE), two.drain("decode-0"), two.flip("decode-0", Role.PREFILL)):
                with pytest.raises(ActuatorError, match="one controls these workers") as told:
                    await refused
                assert told.value.code == HELD
            assert not town.below.more and not town.below.gone and not town.begun.is_set()
            await one.add(Role.DECODE)
            await one.flip("decode-0", Role.PREFILL)
            town.clock.now += 3600.0  # nobody controls any more
            await two.drain("decode-1")
        assert (town.below.more, town.below.told, town.below.gone) == (
            [Role.DECODE],
            [("decode-0", Role.PREFILL)],
            ["decode-1"],
        )
    finally:
        await one.close()
        await two.close()
        await door.stop(None)
