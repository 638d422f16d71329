"""The work that is offered, as the overview tells it: what was refused counts, what is invalid does not."""

from __future__ import annotations

import asyncio

import pytest

from router.offered import OfferedWork
from router.overview import RouterOverview
from serving.errors import ContextLengthExceeded, Overloaded
from serving.messages import Slo
from serving.step_cost import pairs
from tests.router.conftest import World, wanted
from tests.router.scripted import Script

SLO = Slo(ttft_ms=1000.0, tpot_ms=100.0)


def work(world: World) -> OfferedWork:
    return OfferedWork(**RouterOverview(world.router).workers()["classes"]["standard"]["work"])


async def test_what_was_answered_is_counted_with_its_lengths(world: World) -> None:
    world.add("m")
    request = wanted(max_tokens=8, slo=SLO)
    async for _ in world.router.generate(request):
        world.now += 0.01
    prompt, found = len(request.prompt), work(world)
    assert (found.arrived, found.prompt_tokens, found.prompt_pairs) == (1, prompt, pairs(0, prompt))
    assert (found.answered, found.output_tokens, found.decoded_context) == (1, 8, 8 * (prompt + 4))
    assert (found.with_ttft, found.ttft_seconds, found.tpot_seconds) == (1, 1.0, 0.1)
    assert (found.ttft_judged, found.ttft_met, found.tpot_judged, found.tpot_met) == (1, 1, 1, 1)


async def test_refused_work_is_offered_work_that_missed(world: World) -> None:
    world.add("m").script = Script(open=[Overloaded("no", code="slo")])
    request = wanted(slo=SLO)
    with pytest.raises(Overloaded):
        await world.tokens(request)
    found = work(world)
    assert (found.arrived, found.prompt_tokens, found.answered) == (1, len(request.prompt), 0)
    assert (found.ttft_judged, found.ttft_met, found.tpot_judged) == (1, 0, 0)


async def test_an_invalid_request_is_no_work(world: World) -> None:
    world.add("m").script.open = [ContextLengthExceeded("too long", param="prompt")]
    with pytest.raises(ContextLengthExceeded):
        await world.tokens(wanted(slo=SLO))
    assert work(world) == OfferedWork()


async def test_who_is_cancelled_is_work_and_says_nothing_of_objectives(world: World) -> None:
    world.add("m")

    async def read(begun: asyncio.Event) -> None:
        async for _ in world.router.generate(wanted(max_tokens=8, slo=SLO)):
            begun.set()
            await asyncio.Event().wait()

    begun = asyncio.Event()
    reading = asyncio.create_task(read(begun))
    await begun.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    found = work(world)
    assert (found.arrived, found.ttft_judged) == (1, 0)


async def test_what_waits_is_told_in_tokens(world: World) -> None:
    assert RouterOverview(world.router).workers()["waiting_tokens"] == 0
