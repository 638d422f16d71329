"""The loop: it looks, decides and acts in turns, alone, and goes on whatever does not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deploy.autoscaler.actuator import KEPT, ActuatorError, FleetWorker
from deploy.autoscaler.controller import STANDBY, AutoscaleController, Wiring
from deploy.autoscaler.limits import AutoscalerLimits
from deploy.autoscaler.lock import FileLock
from deploy.autoscaler.policy import FlipWorker, ScalingDecision
from router.offered import OfferedWork
from serving.autoscaler_metrics import AutoscalerMetrics
from serving.errors import MillraceError, Unavailable
from serving.log_lines import FIELDS
from serving.messages import Role
from tests.deploy.autoscaler.figures import INTERVAL, D, offered, ready
from tests.deploy.autoscaler.test_observation import WORKER


@dataclass
class Town:
    """A router and a place that do as they are told, and time that passes with each turn."""

    fleet: list[FleetWorker] = field(default_factory=lambda: list(ready(prefill=3, decode=1).workers))
    now: float = 100.0
    requests: int = 0
    asked: list[tuple[str, Any]] = field(default_factory=list)
    failure: MillraceError | None = None
    refusal: ActuatorError | None = None
    free: bool = True

    def __call__(self) -> float:
        return self.now

    async def read(self) -> Any:
        if self.failure is not None:
            raise self.failure
        work = offered(self.requests, prompt=60, output=64)
        workers = [{**WORKER, "name": each.worker_id, "role": each.role.value} for each in self.fleet]
        return {
            "at": self.now,
            "tokens": work.output_tokens,
            "requests_waiting": 0,
            "waiting_tokens": 0,
            "classes": {"standard": {"work": asdict(work)}, "batch": {"work": asdict(OfferedWork())}},
            "workers": workers,
        }

    async def workers(self) -> Sequence[FleetWorker]:
        return list(self.fleet)

    async def add(self, role: Role) -> None:
        self._ask("add", role)

    async def drain(self, worker_id: str) -> None:
        self._ask("drain", worker_id)

    async def flip(self, worker_id: str, role: Role) -> None:
        self._ask("flip", (worker_id, role))

    def _ask(self, what: str, whom: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append((what, whom))

    async def held(self) -> bool:
        return self.free

    async def release(self) -> None:
        self.free = False

    def controller(self, *, dry_run: bool = False) -> AutoscaleController:
        wiring = Wiring(source=self, actuator=self, lock=self, clock=self, sleep=self.pass_time)
        return AutoscaleController(wiring, AutoscalerLimits(), dry_run=dry_run)

    async def pass_time(self, seconds: float) -> None:
        """The decode worker is short: ten requests come in each interval."""
        self.now += seconds
        self.requests += 10

    async def turns(self, controller: AutoscaleController, count: int) -> list[ScalingDecision]:
        decisions = []
        for _ in range(count):
            decisions.append(await controller.turn())
            await self.pass_time(INTERVAL)
        return decisions


async def test_it_flips_a_worker_once_and_then_cools_down() -> None:
    town = Town()
    decisions = await town.turns(town.controller(), 9)
    assert [type(each.action) for each in decisions if each.action is not None] == [FlipWorker]
    ((what, (worker, role)),) = town.asked
    assert (what, role) == ("flip", D) and worker.startswith("prefill")
    assert "cooling down" in decisions[-1].reason


async def test_a_worker_that_is_not_ready_holds_everything_and_the_cool_down_begins_with_its_end() -> None:
    town = Town()
    controller = town.controller()
    town.fleet[0] = FleetWorker("prefill-0", Role.PREFILL, "draining")
    assert {each.reason for each in await town.turns(controller, 6)} == {"prefill-0 is draining: one change at a time"}
    town.fleet[0] = FleetWorker("prefill-0", Role.PREFILL, "ready")
    assert all("cooling down" in each.reason for each in await town.turns(controller, 8)) and not town.asked
    await town.turns(controller, 1)
    assert town.asked


async def test_a_dry_run_says_what_it_would_do_and_does_not(caplog: pytest.LogCaptureFixture) -> None:
    town = Town()
    with caplog.at_level(logging.INFO):
        await town.turns(town.controller(dry_run=True), 9)
    assert town.asked == []
    (line,) = [record for record in caplog.records if "would flip" in record.getMessage()]
    told = getattr(line, FIELDS)
    assert told["action"] == "flip" and told["dry_run"] is True and told["wanted_decode"] > 1
    assert told["attainment_then"] > told["attainment_now"] and "predicted attainment" in line.getMessage()


async def test_who_has_not_the_lock_stands_by() -> None:
    town = Town(free=False)
    controller = town.controller()
    assert {each.reason for each in await town.turns(controller, 6)} == {STANDBY}
    assert town.asked == [] and not controller.figures.leading
    town.free = True
    await town.turns(controller, 1)
    assert town.asked and controller.figures.leading, "it has watched meanwhile"


async def test_a_router_that_is_away_is_asked_again_and_nothing_is_done_meanwhile() -> None:
    town = Town()
    controller = town.controller()
    await town.turns(controller, 3)
    town.failure = Unavailable("no answer from http://router")
    away = await town.turns(controller, 4)
    assert {each.reason for each in away} == {"no answer from http://router"} and controller.figures.failures == 4
    assert controller.health() == (False, "no answer from http")
    town.failure = None
    back = await town.turns(controller, 6)
    assert [each.action for each in back[:3]] == [None] * 3, "it measures a window anew"
    assert len(town.asked) == 1 and controller.health()[0]


async def test_a_router_that_began_anew_is_measured_anew() -> None:
    town = Town()
    controller = town.controller()
    await town.turns(controller, 3)
    town.requests = 0
    assert "begun anew" in (await town.turns(controller, 1))[0].reason
    assert "measuring" in (await town.turns(controller, 2))[-1].reason and town.asked == []


async def test_an_action_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    town = Town(refusal=ActuatorError("the place is full: free a device"))
    controller = town.controller()
    await town.turns(controller, 7)
    assert "flip prefill-0 to decode failed: the place is full" in caplog.text
    town.refusal = None
    await town.turns(controller, 1)
    assert len(town.asked) == 1


async def test_where_workers_keep_their_roles_one_is_added_instead() -> None:
    town = Town(refusal=ActuatorError("its role is that of its Deployment", code=KEPT))
    controller = town.controller()
    await town.turns(controller, 4)
    town.refusal = None
    await town.turns(controller, 4)
    assert town.asked == [("add", D)]


async def test_the_loop_goes_on_until_it_is_cancelled_and_gives_the_lock_back() -> None:
    town, turns = Town(), asyncio.Event()
    controller = town.controller()

    async def sleep(seconds: float) -> None:
        await town.pass_time(seconds)
        if controller.figures.turns > 5:
            turns.set()
            await asyncio.Event().wait()

    controller.wiring = Wiring(source=town, actuator=town, lock=town, clock=town, sleep=sleep)
    running = asyncio.create_task(controller.run())
    await turns.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert town.asked and not town.free


async def test_its_metrics_tell_what_it_did() -> None:
    town = Town()
    controller = town.controller()
    await town.turns(controller, 6)
    text = AutoscalerMetrics(controller.figures).text().decode()
    for line in (
        'millrace:autoscaler_actions_total{action="flip",role="decode"} 1.0',
        "millrace:autoscaler_turns_total 6.0",
        "millrace:autoscaler_leading 1.0",
        'millrace:autoscaler_workers{role="prefill"} 3.0',
    ):
        assert line in text


async def test_one_process_of_a_host_holds_the_file(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert await first.held() and await first.held() and not await second.held()
    await first.release()
    await first.release()
    assert await second.held()
    await second.release()


async def test_where_a_flip_fails_later_since_workers_keep_their_roles_it_flips_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The place tells of it when it is asked for its workers the next time."""
    town = Town()
    controller = town.controller()
    workers, told = town.workers, [ActuatorError("prefill-0 stays prefill", code=KEPT)]

    async def fails_late() -> Sequence[FleetWorker]:
        if town.asked and told:
            raise told.pop()
        return await workers()

    town.workers = fails_late  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO):
        await town.turns(controller, 30)
    assert "prefill-0 stays prefill" in caplog.text and controller.figures.failures == 1
    first, *then = (what for what, _ in town.asked)
    assert first == "flip" and set(then) == {"add"}
