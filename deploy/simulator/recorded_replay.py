"""Plays a trace to a recorded system until all requests have ended, on virtual time.

What came of each request is told in the same form as of a simulated cluster (deploy.simulator.run).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from deploy.simulator.outcomes import RequestOutcome
from deploy.simulator.recorded_colocated import ColocatedReplay
from deploy.simulator.recorded_engines import Machinery
from deploy.simulator.recorded_split import SplitReplay
from deploy.simulator.recorded_systems import RecordedSystem, SplitSystem
from deploy.simulator.run import SimulatedRun, collecting_seldom
from deploy.simulator.texts import ScriptedTexts
from deploy.simulator.traffic import Arrival
from deploy.simulator.virtual_loop import VirtualLoop, run_virtually
from serving.engine.sequence import SequenceOutput


def replay(
    system: RecordedSystem,
    arrivals: Sequence[Arrival],
    rate: float = 1.0,
    *,
    seed: int = 0,
    noise: float = 0.0,
    ended: Callable[[RequestOutcome], None] = lambda outcome: None,
) -> SimulatedRun:
    """All requests of a trace, at `rate` requests a second. Deterministic; `ended` is told of each."""
    with collecting_seldom():
        return run_virtually(lambda loop: _play(loop, system, arrivals, rate, seed, noise, ended))


async def _play(
    loop: VirtualLoop,
    system: RecordedSystem,
    arrivals: Sequence[Arrival],
    rate: float,
    seed: int,
    noise: float,
    ended: Callable[[RequestOutcome], None],
) -> SimulatedRun:
    outcomes = {
        each.request.request_id: RequestOutcome(request=each.request, arrived=each.at / rate) for each in arrivals
    }
    texts = ScriptedTexts({each.request.request_id: each.output_tokens for each in arrivals})
    left, over = len(outcomes), asyncio.Event()

    def tell(output: SequenceOutput) -> None:
        nonlocal left
        assert output.delta is not None
        outcome, now = outcomes[output.seq.request.request_id], loop.time()
        outcome.first_token = now if outcome.first_token is None else outcome.first_token
        outcome.last_token, outcome.finish = now, output.delta.finish
        outcome.tokens += output.delta.tokens
        if output.delta.finish is not None:
            outcome.ended = now
            ended(outcome)
            left -= 1
            if not left:
                over.set()

    machinery = Machinery(loop.time, texts, noise, seed)
    kind = SplitReplay if isinstance(system, SplitSystem) else ColocatedReplay
    running = kind(system, machinery, tell)  # type: ignore[arg-type]
    running.start()
    for outcome in outcomes.values():
        await asyncio.sleep(max(0.0, outcome.arrived - loop.time()))
        running.ask(outcome.request)
    await over.wait()
    await running.stop()
    return SimulatedRun(list(outcomes.values()), seconds=loop.time())
