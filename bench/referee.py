"""Makes comparisons: servers that are up together take turns, every run is kept at once, and tables are written.

It starts servers and sends to them; who is compared is given, and what runs amount to is bench.race's matter.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.contenders import Contender
from bench.endpoint import ServerError
from bench.goodput import SearchLimits
from bench.ledger import Ledger, Trial, TrialKey
from bench.mixture import Mixture
from bench.own_server import commit
from bench.premises import Premises
from bench.progress import say
from bench.race import Race, attainment
from bench.report import number
from bench.sitting import OpenServer, measure, open_server, warm_up
from bench.standings import CaseResult, as_json, markdown
from bench.step_lags import strain


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Contenders over one workload; `case` is what its runs are kept under, in full."""

    name: str
    case: str
    mixture: Mixture
    contenders: tuple[Contender, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonOptions:
    """How comparisons are made. `until` is when no further run begins, in seconds of time.monotonic()."""

    out: Path
    base: tuple[str, ...]  # flags of every server of ours
    seconds: float
    seeds: int
    goal: float
    tolerance: float
    warm_up: float
    start: float | None
    until: float
    first_share: float = 0.7  # of what a closed loop gave, where no first rate is given
    growth: float = 1.3  # between rates until the goodput is bracketed
    lanes: int = 3  # paced servers that are measured at the same time


class Referee:
    """Makes comparisons one after the other, and writes the ledger, tables and JSON of all beside each other."""

    def __init__(self, options: ComparisonOptions, on: Premises | None = None):
        self.options = options
        self.on = on or Premises()
        self.ledger = Ledger(options.out.with_suffix(".jsonl"))
        self.results: list[CaseResult] = []
        self.interrupted = asyncio.Event()
        self.failed = False
        self._commit = commit()
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")

    async def run(self, comparisons: Sequence[Comparison]) -> None:
        """Each has an equal share of the time that is left when it begins; one whose servers fail ends early."""
        for number_, comparison in enumerate(comparisons):
            now = time.monotonic()
            until = now + (self.options.until - now) / (len(comparisons) - number_)
            try:
                await self._compare(comparison, until)
            except ServerError as error:
                self.failed = True
                say(f"bench.policies: {comparison.name}, {comparison.mixture.name} is left as it is: {error}")
            finally:
                self._write()
            if self.interrupted.is_set():
                return

    async def _compare(self, comparison: Comparison, until: float) -> None:
        say(f"── {comparison.name}, {comparison.mixture.name}: {comparison.mixture.describe()}")
        start = self._start_of(comparison)
        async with AsyncExitStack() as stack:
            servers: dict[str, OpenServer] = {}
            if start is None or any(self._next_unmeasured(race) for race in self._races(comparison, start)):
                servers, warmed = await self._open(comparison, stack)
                start = start if start is not None else self._note_start(comparison, warmed)
            races = self._races(comparison, start or 1.0)
            for race in races:
                self._next_unmeasured(race)
            self.results.append(self._result(comparison, races))
            while not self.interrupted.is_set() and time.monotonic() < until:
                if not await self._round(comparison, races, servers, until):
                    break
                self.results[-1] = self._result(comparison, races)
            self.results[-1] = self._result(comparison, races)
        self._print()

    async def _round(
        self, comparison: Comparison, races: Sequence[Race], servers: dict[str, OpenServer], until: float
    ) -> bool:
        """One run of each contender that wants one; False when none does."""
        wanted = False
        for race in races:
            key = self._next_unmeasured(race)
            if key is None:
                continue
            wanted = True
            if self.interrupted.is_set() or time.monotonic() >= until:
                return True
            if not await self._measure(servers[race.contender.name], comparison.mixture, race, key, until):
                return True
        return wanted

    async def _measure(self, server: OpenServer, mixture: Mixture, race: Race, key: TrialKey, until: float) -> bool:
        """The run that the race wants; False where it was interrupted."""
        trial = await measure(
            server,
            mixture,
            key,
            seconds=self.options.seconds,
            allowance=race.allowance,
            interrupted=self.interrupted,
            commit=self._commit,
            lags=self.on.lags,
        )
        if trial is None:
            return False
        self.ledger.add(trial)
        race.record(trial)
        say(self._line(race, trial, until))
        return True

    def _line(self, race: Race, trial: Trial, until: float) -> str:
        share = f"{attainment([trial]):6.1%}" + (" and given up" if trial.stopped else "")
        share += "".join(f", {count} {kind}" for kind, count in trial.errors.items())
        strained = strain(trial.metrics)
        share += f", {strained}" if strained else ""
        found = race.standing()
        between = f"goodput {number(found.rate)} to {number(found.failing)}"
        left = max(0.0, until - time.monotonic()) / 60
        end = "found" if found.finished else f"{left:.0f} min left" if math.isfinite(left) else ""
        place = f"{race.contender.name:<22} {trial.key.rate:7.3g} req/s, seed {trial.key.seed}"
        return f"{datetime.now(UTC):%H:%M:%S}  {place}: {share}  ({between}) {end}"

    def _next_unmeasured(self, race: Race) -> TrialKey | None:
        """What the race wants next, once all that is kept from before has been recorded."""
        while (key := race.next()) is not None and key in self.ledger.trials:
            race.record(self.ledger.trials[key])
        return key

    def _races(self, comparison: Comparison, start: float) -> list[Race]:
        return [self._race(comparison, contender, start) for contender in comparison.contenders]

    def _race(self, comparison: Comparison, contender: Contender, start: float) -> Race:
        options = self.options
        limits = SearchLimits(
            start=start, attainment=options.goal, tolerance=options.tolerance, growth=options.growth, lowest=0.05
        )
        return Race(comparison.case, contender, limits, range(options.seeds))

    def _start_of(self, comparison: Comparison) -> float | None:
        """The first rate, as given or as an earlier life of the comparison has found it."""
        if self.options.start is not None:
            return self.options.start
        kept = self.ledger.notes.get(f"start of {comparison.case}")
        return float(kept) if kept is not None else None

    def _note_start(self, comparison: Comparison, answered: Sequence[float]) -> float:
        start = float(f"{self.options.first_share * statistics.median(answered):.2g}")
        self.ledger.note(f"start of {comparison.case}", start)
        return start

    async def _open(self, comparison: Comparison, stack: AsyncExitStack) -> tuple[dict[str, OpenServer], list[float]]:
        """All servers, each warmed up, and how many requests a second it then answered."""
        servers: dict[str, OpenServer] = {}
        answered = []
        for contender in comparison.contenders:
            server = await self._start(comparison, contender, stack)
            answered.append(await self._warmed(comparison, contender, server))
            servers[contender.name] = server
        return servers, answered

    async def _start(self, comparison: Comparison, contender: Contender, stack: AsyncExitStack) -> OpenServer:
        """The contender's server, which `stack` ends. Raises ServerError."""
        folder = self.options.out.parent / f"{self.options.out.name}-logs"
        model = (str(self.on.model),) if self.on.model is not None else ()
        base = (*model, *self.options.base)
        mixture, module = comparison.mixture, self.on.module
        return await open_server(contender, mixture, stack, base=base, folder=folder, module=module)

    async def _warmed(self, comparison: Comparison, contender: Contender, server: OpenServer) -> float:
        """How many requests a second it answered meanwhile. Raises ServerError."""
        answered = await warm_up(server, comparison.mixture, self.options.warm_up)
        say(f"{contender.name:<22} is warm: {answered:.2f} req/s in a closed loop of six")
        return answered

    def _result(self, comparison: Comparison, races: Sequence[Race]) -> CaseResult:
        return CaseResult(
            name=comparison.name,
            mixture=comparison.mixture,
            standings=[race.standing() for race in races],
            goal=self.options.goal,
            seeds=self.options.seeds,
            seconds=self.options.seconds,
        )

    def _print(self) -> None:
        """The table of the last comparison."""
        print(markdown(self.results[-1:], started_at=self._started_at, commit=self._commit), flush=True)

    def _write(self) -> None:
        told = {"started_at": self._started_at, "commit": self._commit}
        out = self.options.out
        out.with_suffix(".md").write_text(markdown(self.results, **told))
        out.with_suffix(".json").write_text(json.dumps(as_json(self.results, **told), indent=1))
