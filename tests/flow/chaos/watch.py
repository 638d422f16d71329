"""Watches a router's breakers and pairs through its metrics, and remembers when each was not well."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from tests.flow.server import Asking, samples

LOOK_SECONDS = 0.1
Pair = tuple[str, str]


@dataclass
class Spell:
    """When something was first and last seen unwell; times of time.monotonic()."""

    first: float
    last: float


@dataclass
class Watch:
    """`run()` as a task. `breakers`: of workers, by name; `red`: pairs that were."""

    cluster: Asking
    breakers: dict[str, Spell] = field(default_factory=dict)
    red: dict[Pair, Spell] = field(default_factory=dict)
    well: bool = False  # at the last look: every breaker closed, every pair green

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look(await asyncio.to_thread(self.cluster.get, "/metrics"), time.monotonic())
            await asyncio.sleep(LOOK_SECONDS)

    def look(self, answer: tuple[int, bytes], now: float) -> None:
        status, body = answer
        if status != 200:
            self.well = False
            return
        text = body.decode()
        opened = [labels["engine"] for labels, state in samples(text, "worker_breaker") if state]
        pairs = [((labels["prefill"], labels["decode"]), up) for labels, up in samples(text, "pair_up")]
        red = [pair for pair, up in pairs if not up]
        for name in opened:
            self.breakers.setdefault(name, Spell(now, now)).last = now
        for pair in red:
            self.red.setdefault(pair, Spell(now, now)).last = now
        self.well = bool(pairs) and not opened and not red

    async def until_well(self, seconds: float, pairs: int) -> bool:
        """Wait until so many pairs are green and every breaker closed; False where time is up before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status, body = await asyncio.to_thread(self.cluster.get, "/metrics")
            self.look((status, body), time.monotonic())
            if self.well and len(samples(body.decode(), "pair_up")) == pairs:
                return True
            await asyncio.sleep(LOOK_SECONDS)
        return False
