"""A cluster under a kind of load: what comes of a rate, over several seeds at once, and which rate still attains.

It plays runs, in processes beside each other where there are several, and looks for goodput; it shows nothing.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized

from bench.goodput import GoodputSearch, SearchLimits
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.outcomes import OutcomeColumns, RateFigures, RequestOutcome, figures
from deploy.simulator.recorded_replay import replay
from deploy.simulator.recorded_systems import RecordedSystem
from deploy.simulator.run import simulate
from deploy.simulator.trace_files import TraceFile, made_up, natural_rate
from deploy.simulator.traffic import Arrival, Traffic, arriving, drawn

FULL_BATCH = 32  # sequences, for a first guess
LOOK_SECONDS = 0.1  # between looks at how far other processes are
TOLD_EVERY = 32  # requests, by such a process


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A cluster under a kind of load: `requests` at every rate, once for each seed.

    `given` is a trace file, in place of requests that are drawn; a recorded `system` serves them in place of the
    cluster. Runs of several seeds take up to `jobs` processes.
    """

    plan: ClusterPlan
    traffic: Traffic
    requests: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2)
    max_tokens: int | None = None
    given: TraceFile | None = None
    system: RecordedSystem | None = None
    jobs: int = 1

    @property
    def offered(self) -> int:
        """Requests of all seeds together."""
        return (self.requests if self.given is None else self.given.counted) * len(self.seeds)

    @property
    def natural_rate(self) -> float:
        """Requests a second of the trace that was given."""
        assert self.given is not None
        return natural_rate(self.given)

    def arriving(self, seed: int) -> Iterator[Arrival]:
        """One seed's requests, one by one."""
        if self.given is not None:
            return made_up(self.given, self.traffic.classes[0].objectives(self.plan.profile), seed)
        return arriving(self.traffic, self.plan.profile, self.requests, seed, max_tokens=self.max_tokens)

    def run(self, rate: float, seed: int, progress: RunProgress) -> OutcomeColumns:
        """One seed's requests at one rate, of a trace those that count; that have ended, where it is broken off."""
        found, left_out = OutcomeColumns(), set[str]()  # those under way that are not counted
        arrivals = _noting(self.arriving(seed), left_out)

        def ended(outcome: RequestOutcome) -> None:
            name = outcome.request.request_id
            if name in left_out:
                left_out.discard(name)
            else:
                found.add(outcome)
            progress.ended(1)
            if progress.stopped():
                raise RunBrokenOff

        try:
            if self.system is not None:
                replay(self.system, tuple(arrivals), rate, seed=seed, noise=self.plan.noise, ended=ended)
            else:
                simulate(self.plan, arrivals, rate, seed=seed, ended=ended, keep=False)
        except* RunBrokenOff:
            found.whole = False
        return found

    def at(
        self,
        rate: float,
        ended: Callable[[int], None] = lambda count: None,
        *,
        wanted: float = 0.0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> RateFigures:
        """What comes of one rate. No more seeds are run once the share `wanted` cannot be attained any more.

        `ended` hears of so many more requests; once it is `stopped`, what has ended by then is all that comes.
        """
        runs: list[OutcomeColumns] = []
        spare = (1.0 - wanted) * self.offered  # requests that may miss their objectives
        for run in self._runs(rate, RunProgress(ended, stopped)):
            runs.append(run)
            spare -= len(run) - run.met
            if spare < -0.5 and run.whole:
                break
        return figures(rate, runs)

    def _runs(self, rate: float, progress: RunProgress) -> Iterator[OutcomeColumns]:
        """Seed by seed, in their order."""
        if min(self.jobs, len(self.seeds)) < 2:
            for seed in self.seeds:
                yield (found := self.run(rate, seed, progress))
                if not found.whole:
                    break
            return
        context = multiprocessing.get_context("fork")  # everything is loaded, and nothing runs beside it yet
        over, stop, told = context.Value("L", 0), context.Value("b", 0), 0
        with context.Pool(min(self.jobs, len(self.seeds)), _share, (over, stop)) as pool:
            asked = [pool.apply_async(_run_apart, (self, rate, seed)) for seed in self.seeds]
            for answer in asked:
                while not answer.ready():
                    answer.wait(LOOK_SECONDS)
                    progress.ended(over.value - told)
                    told, stop.value = over.value, progress.stopped()
                yield answer.get()

    def goodput(
        self,
        limits: SearchLimits,
        measured: Callable[[float], RateFigures],
        stopped: Callable[[], bool] = lambda: False,
    ) -> float | None:
        """The highest rate that attains; None where none does, or where it was `stopped` before it knew.

        `measured` is `at`, or something around it.
        """
        search = GoodputSearch(limits)
        while (rate := search.next_rate()) is not None:
            found = measured(rate)
            if stopped():
                return None
            search.record(rate, found.attainment)
        return search.answer

    def first_rate(self) -> float:
        """A guess at a rate that could be kept up: each worker computes prompts, or decodes in full batches."""
        profile, (prompt, output) = self.plan.profile, self._mean_lengths()
        decoding = profile.decode_seconds(FULL_BATCH, int(prompt + output)) / FULL_BATCH * output
        return len(self.plan.roles) / (profile.prompt_seconds(int(prompt)) + decoding) / 2

    def _mean_lengths(self) -> tuple[float, float]:
        """Prompt and output tokens of the first seed's requests."""
        if self.given is not None:
            return self.given.prompt_tokens / len(self.given), self.given.output_tokens / len(self.given)
        requests = drawn(self.traffic, self.plan.profile, self.requests, self.seeds[0])
        return int(requests.prompt.sum()) / len(requests), int(requests.output.sum()) / len(requests)


def _noting(arrivals: Iterator[Arrival], left_out: set[str]) -> Iterator[Arrival]:
    """All of them; of those that are not counted the names are added."""
    for arrival in arrivals:
        if not arrival.counted:
            left_out.add(arrival.request.request_id)
        yield arrival


class RunBrokenOff(Exception):
    """Ends a run that nobody wants to wait for any more."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Told how far a run is, and asked if it is to be broken off, as of Study.at."""

    ended: Callable[[int], None]
    stopped: Callable[[], bool]


_over: Synchronized[int]  # requests that have ended in all processes of a pool; set in each of them
_stop: Synchronized[int]  # 1 once they are to be broken off


def _share(over: Synchronized[int], stop: Synchronized[int]) -> None:
    global _over, _stop
    _over, _stop = over, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that shows what there is


def _run_apart(study: Study, rate: float, seed: int) -> OutcomeColumns:
    """One run, in a process of a pool."""
    done = 0

    def ended(count: int) -> None:
        nonlocal done
        done += count
        if done % TOLD_EVERY == 0:
            with _over.get_lock():
                _over.value += TOLD_EVERY

    return study.run(rate, seed, RunProgress(ended, lambda: bool(_stop.value)))
