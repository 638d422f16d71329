"""A cluster under a kind of load: what comes of a rate, over several seeds at once, and which rate still attains.

It plays runs, in processes beside each other where there are several, and looks for goodput; it shows nothing.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized

from bench.goodput import GoodputSearch, SearchLimits
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.outcomes import RateFigures, RequestOutcome, figures
from deploy.simulator.recorded_replay import replay
from deploy.simulator.recorded_systems import RecordedSystem
from deploy.simulator.run import simulate
from deploy.simulator.trace_files import TracedRequest, as_arrivals, natural_rate
from deploy.simulator.traffic import Arrival, Traffic, trace

FULL_BATCH = 32  # sequences, for a first guess
LOOK_SECONDS = 0.1  # between looks at how far other processes are
TOLD_EVERY = 32  # requests, by such a process

Ended = Callable[[int], None]
"""So many more requests have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A cluster under a kind of load: `requests` at every rate, once for each seed.

    `given` are the requests of a trace file, in place of those that are drawn; a recorded `system` serves them in
    place of the cluster. Runs of several seeds take up to `jobs` processes.
    """

    plan: ClusterPlan
    traffic: Traffic
    requests: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2)
    max_tokens: int | None = None
    given: tuple[TracedRequest, ...] = ()
    system: RecordedSystem | None = None
    jobs: int = 1

    @property
    def offered(self) -> int:
        """Requests of all seeds together."""
        return (sum(each.counted for each in self.given) or self.requests) * len(self.seeds)

    @property
    def natural_rate(self) -> float:
        """Requests a second of the trace that was given."""
        return natural_rate(self.given)

    def trace(self, seed: int) -> tuple[Arrival, ...]:
        if self.given:
            return as_arrivals(self.given, self.traffic.classes[0].objectives(self.plan.profile), seed)
        return trace(self.traffic, self.plan.profile, self.requests, seed, max_tokens=self.max_tokens)

    def run(self, rate: float, seed: int, ended: Callable[[RequestOutcome], None]) -> list[RequestOutcome]:
        """One seed's requests at one rate; of a trace, those that count."""
        arrivals = self.trace(seed)
        if self.system is not None:
            done = replay(self.system, arrivals, rate, seed=seed, noise=self.plan.noise, ended=ended)
        else:
            done = simulate(self.plan, arrivals, rate, seed=seed, ended=ended)
        if not self.given:
            return done.outcomes
        return [outcome for outcome, each in zip(done.outcomes, self.given, strict=True) if each.counted]

    def at(self, rate: float, ended: Ended = lambda count: None, *, wanted: float = 0.0) -> RateFigures:
        """What comes of one rate. No more seeds are run once the share `wanted` cannot be attained any more."""
        runs: list[list[RequestOutcome]] = []
        spare = (1.0 - wanted) * self.offered  # requests that may miss their objectives
        for run in self._runs(rate, ended):
            runs.append(run)
            spare -= sum(not outcome.met for outcome in run)
            if spare < -0.5:
                break
        return figures(rate, runs)

    def _runs(self, rate: float, ended: Ended) -> Iterator[list[RequestOutcome]]:
        """Seed by seed, in their order."""
        if min(self.jobs, len(self.seeds)) < 2:
            for seed in self.seeds:
                yield self.run(rate, seed, lambda outcome: ended(1))
            return
        context = multiprocessing.get_context("fork")  # everything is loaded, and nothing runs beside it yet
        over, told = context.Value("L", 0), 0
        with context.Pool(min(self.jobs, len(self.seeds)), _share, (over,)) as pool:
            asked = [pool.apply_async(_run_apart, (self, rate, seed)) for seed in self.seeds]
            for answer in asked:
                while not answer.ready():
                    answer.wait(LOOK_SECONDS)
                    ended(over.value - told)
                    told = over.value
                yield answer.get()

    def goodput(self, limits: SearchLimits, measured: Callable[[float], RateFigures]) -> float | None:
        """The highest rate that attains; None where none does. `measured` is `at`, or something around it."""
        search = GoodputSearch(limits)
        while (rate := search.next_rate()) is not None:
            search.record(rate, measured(rate).attainment)
        return search.answer

    def first_rate(self) -> float:
        """A guess at a rate that could be kept up: each worker computes prompts, or decodes in full batches."""
        profile, arrivals = self.plan.profile, self.trace(self.seeds[0])
        prompt = sum(len(each.request.prompt) for each in arrivals) / len(arrivals)
        output = sum(each.output_tokens for each in arrivals) / len(arrivals)
        decoding = profile.decode_seconds(FULL_BATCH, int(prompt + output)) / FULL_BATCH * output
        return len(self.plan.roles) / (profile.prompt_seconds(int(prompt)) + decoding) / 2


_over: Synchronized[int]  # requests that have ended in all processes of a pool; set in each of them


def _share(over: Synchronized[int]) -> None:
    global _over
    _over = over


def _run_apart(study: Study, rate: float, seed: int) -> list[RequestOutcome]:
    """One run, in a process of a pool. Prompts stay there: nobody reads them any more."""
    done = 0

    def ended(outcome: RequestOutcome) -> None:
        nonlocal done
        done += 1
        if done % TOLD_EVERY == 0:
            with _over.get_lock():
                _over.value += TOLD_EVERY

    outcomes = study.run(rate, seed, ended)
    for outcome in outcomes:
        outcome.request = replace(outcome.request, prompt=outcome.request.prompt[:1])
    return outcomes
