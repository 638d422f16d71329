"""Servers that are up together and take turns: opened, warmed up, and measured with runs of a mixture of requests.

It sends and measures; which run is wanted next, and what runs amount to, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench.connection import HttpClient
from bench.contenders import NO_SHEDDING, NO_SHEDDING_TOML, Contender
from bench.endpoint import Endpoint, RequestShape, ServerError, Target, first_model, wait_ready
from bench.ledger import Trial, TrialKey
from bench.load import Pace, Prepared, Run, Watch, run_load
from bench.mixture import Mixture, TimedAsk
from bench.own_server import OwnServer
from bench.prompts import Prompts, choose_prompts, find_counter
from bench.sse import Outcome
from bench.step_lags import StrainWatch
from bench.summary import SloTargets, summarize

WARM_SEED = 10_007  # of requests that are not counted
WARM_AT_A_TIME = 6
WARM_FEWEST = 2 * WARM_AT_A_TIME  # answers, however long they take,
WARM_MOST = 20  # times the seconds asked for, at most
IDLE_SECONDS = 20.0
BASE_FLAGS = ("--threads", "1", "--kv-cache-memory", "384MiB", "--log-level", "warning")  # of servers of ours
KEPT_METRICS = (
    "duration",
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "p90_ttft_ms",
    "median_tpot_ms",
    "p90_tpot_ms",
    "p99_send_delay_ms",
    "client_cpu_s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenServer:
    """A server that answers, and how to write to it; `own` where it is ours."""

    endpoint: Endpoint
    prompts: Prompts
    own: OwnServer | None = None

    def prepare(self, timed: Sequence[TimedAsk]) -> list[Prepared]:
        """Bodies with the objectives of each request's kind, if the server is ours."""
        shapes: dict[str, RequestShape] = {}
        found = []
        for asked in timed:
            kind, ask = asked.kind, asked.ask
            if kind.name not in shapes:
                extra = kind.fields() if self.own is not None else {}
                shapes[kind.name] = replace(self.endpoint.shape, extra=extra)
            body = shapes[kind.name].body(self.prompts.write(ask), ask.output_tokens)
            found.append(
                Prepared(body=body, prompt_tokens=ask.prompt_tokens, output_tokens=ask.output_tokens, kind=kind.name)
            )
        return found


async def open_server(
    contender: Contender,
    mixture: Mixture,
    stack: AsyncExitStack,
    *,
    base: Sequence[str],
    folder: Path,
    module: str = "deploy.cli",
) -> OpenServer:
    """Start the contender's server, which is `module`, or reach it; `stack` ends it. Raises ServerError."""
    own = None
    if contender.ours:
        flags = flags_in(folder, (*base, *mixture.flags, *contender.flags))
        log = folder / f"{contender.name.replace(' ', '-')}.log"
        own = await stack.enter_async_context(OwnServer(flags, workers=contender.workers(), log=log, module=module))
    target = Target(name=contender.name, url=own.url if own is not None else contender.url or "")
    client = HttpClient(target.url, timeout=120.0)
    stack.push_async_callback(client.close)
    await wait_ready(client, 10.0)
    endpoint = Endpoint(target, client, RequestShape(model=await first_model(client)))
    prompts = await choose_prompts(endpoint, await find_counter(endpoint, None), "auto")
    return OpenServer(endpoint=endpoint, prompts=prompts, own=own)


def flags_in(folder: Path, flags: Sequence[str]) -> list[str]:
    """The flags with the files that they name, which are written there."""
    if NO_SHEDDING in flags:
        folder.mkdir(parents=True, exist_ok=True)
        Path(NO_SHEDDING.format(folder=folder)).write_text(NO_SHEDDING_TOML)
    return [flag.replace("{folder}", str(folder)) for flag in flags]


async def warm_up(server: OpenServer, mixture: Mixture, seconds: float) -> float:
    """Requests of this kind for about so long, so that it learns what they cost; how many a second were answered.

    Raises ServerError when not one succeeds.
    """
    loop, over, answered = asyncio.get_running_loop(), asyncio.Event(), 0
    timed = mixture.timed(1.0, 40 + int(20 * seconds), seed=WARM_SEED, fresh=(time.time_ns(),))
    plenty = await asyncio.to_thread(server.prepare, timed)  # others may be measured meanwhile
    enough = loop.time() + seconds

    def finished(outcome: Outcome) -> None:
        nonlocal answered
        answered += outcome.error is None
        if answered >= WARM_FEWEST and loop.time() >= enough:
            over.set()

    timer = loop.call_later(WARM_MOST * seconds, over.set)
    watch = Watch(finished=finished, interrupted=over)
    run = await run_load(server.endpoint, plenty, Pace(concurrency=WARM_AT_A_TIME), watch)
    timer.cancel()
    good = [outcome for outcome in run.outcomes if outcome.error is None]
    if not good:
        failed = Counter(f"{outcome.error}: {outcome.detail}" for outcome in run.outcomes)
        told = failed.most_common(1)[0][0] if failed else "nothing was answered in time"
        raise ServerError(f"{server.endpoint.target.url}: every warm-up request failed: {told}")
    await settle(server)
    return len(good) / max(run.duration, 1e-9)


async def settle(server: OpenServer) -> None:
    """Wait until a server of ours holds nothing. Raises ServerError when it has died."""
    if server.own is None:
        await asyncio.sleep(0.5)
    elif not server.own.running:
        raise ServerError(f"the server {server.endpoint.target.name} has ended; its log is {server.own.log}")
    else:
        await server.own.wait_idle(IDLE_SECONDS)


async def measure(
    server: OpenServer,
    mixture: Mixture,
    key: TrialKey,
    *,
    seconds: float,
    allowance: Callable[[int], int],
    interrupted: asyncio.Event,
    commit: str = "",
    lags: Path | None = None,
) -> Trial | None:
    """One run at `key`'s rate, ended early when more than `allowance(offered)` requests missed; None: interrupted.

    Paced workers write how late their steps end to the folder `lags`, of which the run's metrics then tell.
    """
    offered = mixture.count(key.rate, seconds)
    timed = mixture.timed(key.rate, offered, seed=key.seed, fresh=(round(key.rate * 1e6),))
    missed, allowed = 0, allowance(offered)

    def hopeless(outcome: Outcome) -> bool:
        nonlocal missed
        missed += not mixture.met(outcome)
        return missed > allowed

    prepared, arrivals = await asyncio.to_thread(server.prepare, timed), tuple(asked.at for asked in timed)
    gc.collect()
    strained = StrainWatch(lags) if lags is not None else None
    run = await run_load(
        server.endpoint, prepared, Pace(arrivals=arrivals), Watch(hopeless=hopeless, interrupted=interrupted)
    )
    told = strained.metrics() if strained is not None else {}
    await settle(server)
    if run.stopped == "interrupted":
        return None
    trial = trial_of(run, mixture, key, commit=commit)
    return replace(trial, metrics={**trial.metrics, **told})


def trial_of(run: Run, mixture: Mixture, key: TrialKey, *, commit: str = "") -> Trial:
    """A run in the numbers that are kept."""
    ended = [outcome for outcome in run.outcomes if outcome.error != "interrupted"]
    kinds: dict[str, list[int]] = {kind.name: [0, 0] for kind in mixture.kinds}
    for outcome in ended:
        counts = kinds[outcome.kind]
        counts[0], counts[1] = counts[0] + 1, counts[1] + mixture.met(outcome)
    summary = summarize(run, SloTargets())
    return Trial(
        key=key,
        offered=run.planned,
        ended=len(ended),
        met=sum(map(mixture.met, ended)),
        kinds=kinds,
        errors=dict(summary.errors),
        examples=dict(summary.examples),
        metrics={name: summary.metrics[name] for name in KEPT_METRICS if name in summary.metrics},
        warnings=summary.warnings,
        stopped=bool(run.stopped),
        at=time.time(),
        commit=commit,
    )
