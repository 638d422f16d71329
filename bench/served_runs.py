"""A server of one deployment that is up: it learns, answers runs, and says at any time what its workers have learned.

It measures; which run is wanted next, and what is made of them, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson

from bench.agreement import measured_figures
from bench.connection import TransportError
from bench.deployments import ServedRun, ServedWorkers, mean_profile, prelude, row_of, salted
from bench.endpoint import ServerError
from bench.load import Pace, Watch, run_load
from bench.mixture import Mixture, RequestKind, TimedAsk
from bench.sitting import OpenServer, settle
from bench.sse import Outcome

HEARTBEAT_SECONDS = 1.0  # of `millrace serve`
LOOK_SECONDS = 2.0  # between looks at what the workers of a run have learned
# Single requests of two tokens. A short prompt's TTFT tells what is around its steps, a usual one's second token how
# long the end of a handoff takes.
SHORT, USUAL = (
    Mixture(name="lone", kinds=(RequestKind(name="lone", prompt_tokens=tokens, output_tokens=2),))
    for tokens in (32, 256)
)
LONE_REQUESTS = 12
LONE_PAUSE = 0.1  # seconds between them
Profiles = dict[str, dict[str, Any]]  # by role, as `millrace profile` writes them


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedDeployment:
    """`sizes` are what a server does not tell of its model: layers, and bytes of a token's KV."""

    server: OpenServer
    deployment: ServedWorkers
    sizes: tuple[int, int]
    interrupted: asyncio.Event

    async def profiles(self) -> Profiles:
        """What the workers have learned, as of their last heartbeats. Raises ServerError, TransportError."""
        answer = await self.server.endpoint.client.get("/v1/workers")
        told = orjson.loads(answer.body)["workers"]
        found = {}
        for role in self.deployment.roles:
            measured = next((each["measured"] for each in told if each["name"] == f"{role}-0"), None)
            if measured is None:
                raise ServerError(f"{role}-0 has measured no step: see the server's log")
            layers, kv_bytes = self.sizes
            found[role] = {**measured, "layers": layers, "kv_bytes": kv_bytes}
        return found

    async def latest(self) -> Profiles:
        """The same once the last steps are told of."""
        await asyncio.sleep(1.5 * HEARTBEAT_SECONDS)
        return await self.profiles()

    async def lone(self, mixture: Mixture, seed: int) -> list[dict[str, Any]]:
        """One request after the other, on an idle server, as rows of a trace ten seconds apart, each with its `span`.

        That is of the clock of its workers: CLOCK_MONOTONIC, of one host.
        """
        timed = mixture.timed(1.0, LONE_REQUESTS, seed=seed, fresh=(time.time_ns(),))
        rows = []
        for number, asked in enumerate(timed):
            outcomes = await self._sent([asked], Pace(concurrency=1))
            span = (outcomes[0].sent, outcomes[0].last)
            rows.append({**row_of(replace(asked, at=10.0 * number), outcomes[0]), "span": span})
            await asyncio.sleep(LONE_PAUSE)
        if any(row["tpot_ms"] is None for row in rows):
            raise ServerError("single requests were not answered: see the server's log")
        return rows

    async def measure(self, case: ServedRun, rate: float, seconds: float, seed: int) -> dict[str, Any] | None:
        """One run: what was asked and came of each request, and what the workers had learned by then, in the mean.

        None where it was interrupted.
        """
        timed = salted(case.mixture.timed(rate, case.mixture.count(rate, seconds), seed=seed), case.key)
        before, load, began = prelude(timed), os.getloadavg()[0], time.monotonic()
        first = await self._sent(before, Pace(concurrency=1))
        gc.collect()
        looks = [await self.profiles()]
        pace = Pace(arrivals=tuple(one.at for one in timed))
        looking = asyncio.create_task(self._look(looks), name="look")
        try:
            outcomes = await self._sent(timed, pace)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        if self.interrupted.is_set():
            return None
        await settle(self.server)
        looks.append(await self.latest())
        rows = [row_of(one, outcome, counted=False) for one, outcome in zip(before, first, strict=True)]
        rows += [row_of(one, outcome) for one, outcome in zip(timed, outcomes, strict=True)]
        return {
            "rate": rate,
            "load": load,
            "measured": asdict(measured_figures(outcomes, case.mixture.met)),
            "profiles": {role: mean_profile([look[role] for look in looks]) for role in self.deployment.roles},
            "rows": rows,
            "at": time.time(),
            "span": (began, time.monotonic()),  # of the clock of its workers
        }

    async def _sent(self, timed: Sequence[TimedAsk], pace: Pace) -> list[Outcome]:
        watch = Watch(interrupted=self.interrupted)
        return (await run_load(self.server.endpoint, self.server.prepare(timed), pace, watch)).outcomes

    async def _look(self, looks: list[Profiles]) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(TransportError):
                looks.append(await self.profiles())
