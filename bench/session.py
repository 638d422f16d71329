"""One run of the benchmark: all servers in turn, at every load, round after round.

It joins workload, prompts, load and search, and keeps what was measured; it formats and prints nothing.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from bench.connection import HttpClient
from bench.endpoint import Endpoint, RequestShape, ServerError, Target, first_model, wait_ready
from bench.goodput import GoodputSearch, SearchLimits
from bench.load import Pace, Prepared, Run, Watch, run_load
from bench.options import BenchOptions, Point
from bench.progress import Progress
from bench.prompts import Prompts, TokenCounter, choose_prompts, find_counter
from bench.replay import trace_arrivals
from bench.sse import Outcome
from bench.summary import Summary, recount_warning, summarize
from bench.workload import poisson_arrivals

RECOUNTED_ANSWERS = 16  # whose text is tokenized again, after the clock has stopped


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One server at one load, once."""

    target: str
    point: Point
    round: int
    summary: Summary
    outcomes: tuple[Outcome, ...] = ()  # when details were asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one search for the goodput ended with; `rate` is None when no rate attains."""

    target: str
    round: int
    rate: float | None
    complete: bool  # false when it was interrupted


@dataclass(kw_only=True, slots=True)
class Results:
    """All that was measured so far."""

    measurements: list[Measurement] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    models: dict[str, str] = field(default_factory=dict)  # by target
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def at(self, point: Point, target: str) -> list[Measurement]:
        """The rounds of one server at one load."""
        return [one for one in self.of(target) if one.point == point]

    def of(self, target: str) -> list[Measurement]:
        """Everything that was measured of one server."""
        return [one for one in self.measurements if one.target == target]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredServer:
    """A server that has answered: how to send to it, and how to write and count for it."""

    endpoint: Endpoint
    prompts: Prompts
    counter: TokenCounter | None

    @property
    def name(self) -> str:
        return self.endpoint.target.name


class BenchSession:
    """Measures as the options say into `results`, which can be read at any time."""

    def __init__(
        self,
        options: BenchOptions,
        *,
        progress: Progress,
        on_point: Callable[[Point], None] = lambda point: None,
        on_ready: Callable[[], None] = lambda: None,
    ):
        self.results = Results()
        self._options = options
        self._progress = progress
        self._on_point = on_point  # a load has been measured on all servers
        self._on_ready = on_ready  # all servers have answered
        self._interrupted = asyncio.Event()

    def interrupt(self) -> None:
        """Stops the measurement in progress; what has finished is kept."""
        self.results.interrupted = True
        self._interrupted.set()

    async def run(self) -> Results:
        """Raises ServerError when a server cannot be measured at all."""
        async with AsyncExitStack() as stack:
            servers = [await self._open(target, stack) for target in self._options.targets]
            self._on_ready()
            if self._options.search is not None:
                await self._search_all(servers, self._options.search)
            else:
                await self._measure_all(servers)
        return self.results

    async def _open(self, target: Target, stack: AsyncExitStack) -> MeasuredServer:
        options = self._options
        client = HttpClient(target.url, headers=options.headers, timeout=options.timeout)
        stack.push_async_callback(client.close)
        await wait_ready(client, options.wait_ready)
        shape = RequestShape(
            model=options.model or await first_model(client),
            chat=options.chat,
            ignore_eos=options.ignore_eos,
            temperature=options.temperature,
            extra=options.extra_body,
        )
        endpoint = Endpoint(target, client, shape)
        counter = await find_counter(endpoint, options.tokenizer)
        prompts = await choose_prompts(endpoint, counter, options.prompt_form)
        self.results.models[target.name] = shape.model
        if prompts.note:
            self.results.notes.append(f"{target.name}: {prompts.note}")
        return MeasuredServer(endpoint=endpoint, prompts=prompts, counter=counter)

    async def _measure_all(self, servers: list[MeasuredServer]) -> None:
        for number, point in enumerate(self._options.points):
            for round_ in range(self._options.repeat):
                for server in servers:
                    await self._measure(server, point, round_, fresh=number * self._options.repeat + round_)
                    if self.results.interrupted:
                        return
            self._on_point(point)

    async def _search_all(self, servers: list[MeasuredServer], limits: SearchLimits) -> None:
        for round_ in range(self._options.repeat):
            for server in servers:
                rate = await self._search(server, limits, round_)
                complete = not self.results.interrupted
                self.results.found.append(Found(target=server.name, round=round_, rate=rate, complete=complete))
                if self.results.interrupted:
                    return

    async def _search(self, server: MeasuredServer, limits: SearchLimits, round_: int) -> float | None:
        """The highest rate that attains. What misses the objectives one request at a time misses them at any rate."""
        fresh = round_ * (limits.probes + 1)
        alone = await self._measure(server, Point(concurrency=1), round_, fresh=fresh, may_give_up=True, keep=False)
        metrics = alone.summary.metrics
        if self.results.interrupted:
            return None
        if metrics.get("slo_attainment", 0.0) < limits.attainment:
            self.results.notes.append(f"{server.name}: requests miss the objectives even one at a time")
            return None
        if self._options.points[0].rate is None:  # no first rate was given: the one that keeps about one in flight
            start = min(max(1e3 / metrics["mean_e2el_ms"], limits.lowest), limits.highest)
            limits = replace(limits, start=start)
        search = GoodputSearch(limits)
        while not self.results.interrupted and (rate := search.next_rate()) is not None:
            fresh += 1
            measured = await self._measure(server, Point(rate=rate), round_, fresh=fresh, may_give_up=True)
            search.record(rate, measured.summary.metrics.get("slo_attainment", 0.0))
        return search.answer

    async def _measure(
        self,
        server: MeasuredServer,
        point: Point,
        round_: int,
        *,
        fresh: int,
        may_give_up: bool = False,
        keep: bool = True,
    ) -> Measurement:
        options = self._options
        await self._warm_up(server, point, fresh)
        requests, pace = self._prepare(server, point, options.count(point), 2 * fresh)
        self._progress.start(
            f"{server.name}, {point.describe()}, round {round_ + 1}/{options.repeat}", total=len(requests)
        )
        watch = Watch(
            finished=self._progress.step,
            hopeless=self._hopeless(len(requests)) if may_give_up else lambda outcome: False,
            interrupted=self._interrupted,
        )
        gc.collect()
        run = await run_load(server.endpoint, requests, pace, watch)
        summary = await self._recounted(server, run, summarize(run, options.slo))
        measured = Measurement(
            target=server.name,
            point=point,
            round=round_,
            summary=summary,
            outcomes=tuple(run.outcomes) if options.details else (),
        )
        if run.outcomes and (keep or summary.failed):  # failures must be seen
            self.results.measurements.append(measured)
        return measured

    async def _warm_up(self, server: MeasuredServer, point: Point, fresh: int) -> None:
        """Sends requests of the same kind that do not count. Raises ServerError when not one succeeds."""
        if not self._options.warmups:
            return
        requests, _ = self._prepare(server, point, self._options.warmups, 2 * fresh + 1)
        self._progress.start(f"{server.name}, warming up", len(requests))
        at_a_time = point.concurrency or min(8, len(requests))
        watch = Watch(finished=self._progress.step, interrupted=self._interrupted)
        run = await run_load(server.endpoint, requests, Pace(concurrency=at_a_time), watch)
        if not run.stopped and all(outcome.error for outcome in run.outcomes):
            first = run.outcomes[0]
            problem = f"every warm-up request failed: {first.error}: {first.detail}"
            raise ServerError(f"{server.endpoint.target.url}: {problem}")

    def _prepare(self, server: MeasuredServer, point: Point, count: int, fresh: int) -> tuple[list[Prepared], Pace]:
        options = self._options
        requests = [
            Prepared(
                body=server.endpoint.shape.body(server.prompts.write(ask), ask.output_tokens),
                prompt_tokens=ask.prompt_tokens,
                output_tokens=ask.output_tokens,
            )
            for ask in options.workload.asks(count, seed=options.seed, fresh=fresh)
        ]
        if point.concurrency is not None:
            return requests, Pace(concurrency=point.concurrency)
        if options.workload.kind == "trace":
            arrivals = trace_arrivals(options.workload.trace, count, point.rate)
        else:
            assert point.rate is not None, "only a trace has times of its own"
            arrivals = poisson_arrivals(point.rate, count, options.seed)
        return requests, Pace(arrivals=tuple(arrivals))

    def _hopeless(self, planned: int) -> Callable[[Outcome], bool]:
        """Says when so many requests have missed that the share wanted is out of reach: a rate too high ends early."""
        slo = self._options.slo
        allowed = planned * (1 - slo.attainment)
        missed = 0

        def judge(outcome: Outcome) -> bool:
            nonlocal missed
            missed += not slo.met(outcome)
            return missed > allowed + 1e-9

        return judge

    async def _recounted(self, server: MeasuredServer, run: Run, summary: Summary) -> Summary:
        """Holds the token counts against the text itself, where there is a tokenizer to ask."""
        answers = [one for one in run.outcomes if one.error is None and one.text][:RECOUNTED_ANSWERS]
        if server.counter is None or not answers or run.stopped:
            return summary
        try:
            recounted = [len(await server.counter.encode("".join(answer.text))) for answer in answers]
        except ServerError as error:
            return summary.warned(f"token counts could not be checked: {error}")
        return summary.warned(recount_warning([answer.output_tokens for answer in answers], recounted))
