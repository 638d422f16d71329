"""Runs a scenario under load: harm, healing, the wait until all is well; and says what did not hold.

What held is a Result, one line of a table; `complaints` are what the tests and the command both go by.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.awake import Awake
from tests.flow.chaos.cluster import ChaosCluster
from tests.flow.chaos.load import Client, Load, Outcome, Text
from tests.flow.chaos.scenarios import Scenario
from tests.flow.chaos.watch import Watch
from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import wait_until

STREAMS = 6
PATIENCE = 60.0  # seconds for an undisturbed text
TOKENS = 200
RED_SECONDS = 5.0
WELL_SECONDS = 60.0  # a breaker that has opened again and again pauses for 37 s at most
IDLE_SECONDS = 10.0
BEFORE = 1.5  # seconds of undisturbed load


@dataclass(frozen=True)
class Result:
    """What a scenario came to; seconds, without those in which this machine stood still. `red_after` and `green_after`
    count from the harm and from its end.

    `early`: requests that had ended before the harm, `opened`: workers whose breaker was seen not closed.
    """

    scenario: Scenario
    outcomes: Sequence[Outcome]
    replacements: int
    resets: int
    watch: Watch
    awake: Awake
    harmed_at: float
    healed_at: float
    well: bool
    idle_after: float | None

    @property
    def red_after(self) -> float | None:
        """Until the last of the pairs that had to be red was; None where one never was."""
        spells = [self.watch.red.get(pair) for pair in self.scenario.red]
        found = [self.awake.seconds(self.harmed_at, spell.first) for spell in spells if spell is not None]
        return max(found) if found and len(found) == len(spells) else None

    @property
    def green_after(self) -> float | None:
        """Until the last pair was green again for good; None where none was red or one still is."""
        if not self.watch.red or not self.well:
            return None
        return max(0.0, max(spell.last for spell in self.watch.red.values()) - self.healed_at)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is not None]

    def complaints(self) -> list[str]:
        """What was promised and did not hold."""
        found = [] if self.scenario.hopeless else [f"failed: {outcome.error}" for outcome in self.failed]
        wrong = sum(not outcome.exact for outcome in self.outcomes if outcome.error is None)
        if wrong:
            found.append(f"{wrong} texts are not those of an undisturbed run")
        if any(outcome.hung for outcome in self.outcomes):
            found.append("a request outlived its deadline")
        if not self.outcomes:
            found.append("no request was served")
        found += [
            f"{' to '.join(pair)} was not red within {RED_SECONDS} s"
            for pair in sorted(self.scenario.red)
            if (spell := self.watch.red.get(pair)) is None
            or self.awake.seconds(self.harmed_at, spell.first) > RED_SECONDS
        ]
        if not self.well:
            found.append(f"not every breaker was closed and every pair green {WELL_SECONDS:g} s after the harm's end")
        if self.idle_after is None:
            found.append(f"something was still held {IDLE_SECONDS:g} s after the last answer")
        return found

    def false_alarms(self) -> list[str]:
        """Pairs that were red for no fault. On a machine with more work than cores the canary may be late anywhere."""
        spared = self.watch.red.keys() - self.scenario.red - self.scenario.touched
        return [f"{' to '.join(pair)} was red, and had nothing to do with it" for pair in sorted(spared)]


async def undisturbed(model: Path, client: Client, count: int = 8) -> list[Text]:
    """Texts as the whole cluster gives them; checked against `transformers`."""
    wanted = prompts(count, shortest=20, longest=200, seed=77)
    outcomes = await asyncio.gather(*(client.ask(prompt, TOKENS, PATIENCE) for prompt in wanted))
    for prompt, outcome in zip(wanted, outcomes, strict=True):
        assert outcome.error is None and len(outcome.tokens) == TOKENS, outcome
        assert is_greedy_tiny(model, prompt, outcome.tokens), "an undisturbed text is not greedy"
    return [Text(tuple(prompt), tuple(outcome.tokens)) for prompt, outcome in zip(wanted, outcomes, strict=True)]


async def run(cluster: ChaosCluster, scenario: Scenario, client: Client, texts: Sequence[Text]) -> Result:
    """One scenario on a cluster that is well; it is left well, or the result says that it is not."""
    load, watch = Load(client, texts, STREAMS, scenario.deadline), Watch(cluster)
    before = await _replacements(cluster)
    resets = sum(link.resets for link in cluster.network.links())
    load.begin()
    await asyncio.sleep(BEFORE)
    watching = asyncio.create_task(watch.run())
    with Awake() as awake:
        harmed_at = time.monotonic()
        try:
            await asyncio.to_thread(scenario.begin, cluster)
            while (left := scenario.seconds - awake.seconds(harmed_at)) > 0:
                await asyncio.sleep(left)
        finally:
            healed_at = time.monotonic()
            await asyncio.to_thread(scenario.end, cluster)
    well = await watch.until_well(WELL_SECONDS, len(cluster.pairs()))
    watching.cancel()
    await load.stop()
    return Result(
        scenario=scenario,
        outcomes=load.outcomes,
        replacements=await _replacements(cluster) - before,
        resets=sum(link.resets for link in cluster.network.links()) - resets,
        watch=watch,
        awake=awake,
        harmed_at=harmed_at,
        healed_at=healed_at,
        well=well,
        idle_after=await asyncio.to_thread(_idle_after, cluster),
    )


async def _replacements(cluster: ChaosCluster) -> int:
    return int(await asyncio.to_thread(cluster.metric, "replacements_total"))


def _idle_after(cluster: ChaosCluster) -> float | None:
    """Seconds until nothing was held anywhere; None where something still is."""
    began = time.monotonic()
    try:
        wait_until(cluster.idle, IDLE_SECONDS, "idle")
    except AssertionError:
        return None
    return time.monotonic() - began
