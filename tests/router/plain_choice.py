"""The goodput policy's choice once more, as its formulas say it: every worker and pair computed anew, nothing kept.

It is slow, and what the policy's own way of choosing is held against, number by number.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, log2, sqrt

from router.calibration import URGENCIES, Calibration, Drift
from router.candidate import UNHURRIED, Candidate, QueuedPrompt
from router.chances import LEAST_ERROR, within
from router.decode_price import PRICE
from router.goodput import KEPT, SCORE_BAND, USED_BAND
from router.placements import DISPLACED, MIXED, MOST_DISPLACED, SHORTLIST
from router.policy import Considered, Decision, Demand, FleetView, PrefixAware, spread
from router.predict import (
    LATE_SHARE,
    NEVER,
    Prediction,
    after_backlog,
    backlog_seconds,
    token_seconds,
    typical,
)
from serving.messages import Slo
from serving.step_cost import GAP, LEAST_CHUNK, StepCost, StepLoad
from tests.router.plain_queue import queue_seconds, queued_lost
from tests.router.plain_steps import chunk_tokens, held_seconds, pause_seconds


@dataclass(frozen=True)
class PlainPair:
    """One placement; `rank` puts the best first."""

    decode: Candidate | None
    prefill: Candidate
    predicted: Prediction
    score: float
    used: float

    @property
    def rank(self) -> tuple[float, float]:
        return -self.score, self.used

    @property
    def told(self) -> Considered:
        decode = self.decode.status.name if self.decode is not None else ""
        return Considered(self.prefill.status.name, decode, self.predicted, self.score)


def plain_choice(calibration: Calibration, demand: Demand, view: FleetView, now: float) -> Decision | None:
    """What `Goodput(calibration).choose` decides."""
    pairs = PlainChoice(calibration, demand, view, now).pairs()
    if not pairs:
        return PrefixAware().choose(demand, view, now)
    pairs.sort(key=lambda pair: pair.rank)
    near = [pair for pair in pairs if pair.score >= pairs[0].score - SCORE_BAND * demand.weight]
    tied = [pair for pair in near if pair.used <= min(each.used for each in near) * (1 + USED_BAND)]

    def by_request(pair: PlainPair) -> tuple[int, int]:
        return spread(demand, pair.decode) if pair.decode is not None else 0, spread(demand, pair.prefill)

    chosen = min(tied, key=by_request)
    others = [pair for pair in pairs[:KEPT] if pair is not chosen]
    reason = "slo" if len(near) < len(pairs) else "tie" if len(tied) > 1 else "quickest"
    considered = tuple(pair.told for pair in (chosen, *others[: KEPT - 1]))
    if chosen.decode is not None:
        beside, both = chosen.decode.held_leases, chosen.decode.prefills
        chosen.predicted.usual_tpot = calibration.usual_tpot(beside, chosen.predicted.tpot, both=both)
    return Decision(chosen.decode, chosen.prefill, reason, chosen.predicted, considered, demand.texts)


class PlainChoice:
    """One request among the workers of a view."""

    def __init__(self, calibration: Calibration, demand: Demand, view: FleetView, now: float):
        self.calibration = calibration
        self.demand = demand
        self.view = view
        self.now = now
        self.workers = [*view.decode, *view.prefill]
        self.choice = False  # prompts and decodes can be given to different workers
        self.tpot = demand.slo.tpot_ms / 1e3 if demand.slo.tpot_ms is not None else None
        self.output = max(2, demand.output)
        ttft = demand.slo.ttft_ms
        due = ttft is not None and 0.0 < ttft < inf
        self.urgency = max(1, min(URGENCIES - 1, round(log2(ttft)))) if due and ttft is not None else 0
        left = demand.first_token_in
        self.due_in = left if left is not None and demand.build is None else inf

    def cost(self, worker: Candidate) -> StepCost:
        if worker.cost is not None:
            return worker.cost
        seen = [each for each in self.workers if each.cost is not None]
        alike = [each for each in seen if each.status.role == worker.status.role] or seen
        return typical([each.cost for each in alike if each.cost is not None])

    def first_roughly(self, worker: Candidate) -> float:
        return backlog_seconds(worker, self.cost(worker), self.now) + self.cost(worker).token * (
            self.demand.uncached(worker)
        )

    def step(self, worker: Candidate) -> float:
        return self.cost(worker).seconds(worker.decode_load)

    def pairs(self) -> list[PlainPair]:
        demand, view = self.demand, self.view
        if all(worker.cost is None for worker in self.workers):
            return []
        quickest, holder = sorted(view.prefill, key=self.first_roughly)[: 2 * SHORTLIST], self.holder()
        if holder is not None:
            quickest = [holder, *(worker for worker in quickest if worker is not holder)]
        if not view.decode:
            return [self.alone(worker) for worker in quickest]
        fitting = [worker for worker in view.decode if demand.tokens < worker.device_tokens] or list(view.decode)
        able = [worker for worker in fitting if worker.load < 1.0] or fitting

        def text(worker: Candidate) -> float:
            return self.first_roughly(worker) + demand.output * self.step(worker)

        split = sorted((worker for worker in able if not worker.prefills), key=self.step)[:SHORTLIST]

        mixed = sorted((worker for worker in able if worker.prefills), key=text)[:MIXED]
        roomy = holder is not None and holder.load < 1.0 and demand.tokens < holder.device_tokens
        if holder is not None and roomy and holder.decodes and holder in view.decode and holder not in mixed:
            mixed.append(holder)
        self.choice = bool(split) or any(not worker.decodes for worker in view.prefill)
        return [self.pair(prefill, decode) for decode in (*split, *mixed) for prefill in self.feeds(decode, quickest)]

    def holder(self) -> Candidate | None:
        """Of those that have the most of the prompt the one whose prompts are computed first."""
        cached = self.demand.cached
        most = max((cached.get(worker.instance, 0) for worker in self.view.prefill), default=0)
        having = [worker for worker in self.view.prefill if cached.get(worker.instance, 0) == most > 0]
        return min(having, key=lambda worker: max(self.now, worker.prompts_left_at)) if having else None

    def feeds(self, decode: Candidate, quickest: list[Candidate]) -> list[Candidate]:
        """Who may compute the prompt for a decode by this worker."""
        links, found = self.view.links, []
        for worker in quickest:
            if worker is decode or (decode.prefills and worker.decodes) or worker.generation != decode.generation:
                continue
            if links.allows(worker.instance, decode.instance, self.now):
                found.append(worker)
        own = [decode] if decode.prefills and decode in self.view.prefill else []
        return [*found[:SHORTLIST], *own] or self.view.prefills_for(decode, self.now)[:SHORTLIST]

    # ---- a placement -----------------------------------------------------------------------------------------------

    def alone(self, worker: Candidate) -> PlainPair:
        queue, compute, ttft, error, chance, lost, displaced = self.first(worker, None)
        raw = queue, compute, 0.0, 0.0, 0.0, ttft, 0.0, error, LEAST_ERROR, self.urgency, self.due_in
        return PlainPair(None, worker, Prediction(*raw), self.demand.weight * chance - lost - displaced, ttft)

    def pair(self, prefill: Candidate, decode: Candidate) -> PlainPair:
        demand, cost, own, tokens = self.demand, self.cost(decode), prefill is decode, self.output - 1
        queue, compute, ttft, error, chance, passed, displaced = self.first(
            prefill, self.tpot if own and decode.prefills else None
        )
        drift = self.calibration.further(decode.instance, both=decode.prefills)
        each, usual = (
            self.calibration.tokens_a_step(decode.instance, apart)
            for apart in (self.calibration.apart(demand.texts), 0.0)
        )
        rows = decode.decode_load.sequences + 1
        context = decode.decode_load.context_tokens + demand.tokens + rows * self.output / 2
        step = cost.seconds(StepLoad(rows, context, rows, context))
        held = held_seconds(cost, step / each, self.tpot) if decode.prefills else inf
        mean = token_seconds(decode, step, self.beside(decode, self.tpot))
        left = backlog_seconds(decode, cost, self.now)
        pause = pause_seconds(decode, cost, step, self.tpot) / each if left else 0.0
        transfer = 0.0 if own else self.view.links.seconds(prefill.instance, decode.instance, demand.tokens)
        begun = queue if own else queue + compute
        usual_token = min(held, mean / each)
        token = min(held, after_backlog(usual_token, pause, left - begun, tokens)) + transfer / tokens
        tpot = token * factor_of(drift)
        if self.tpot is not None and decode.prefills:  # prompts are held back for it: by steps without them
            chance *= within(self.tpot, step / each + transfer / tokens, cost.error)
        elif self.tpot is not None:
            chance *= within(self.tpot, tpot, sqrt(drift.variance))
        raw = queue, compute, transfer, step, token, ttft, tpot, error, sqrt(drift.variance), self.urgency, self.due_in
        lost = others_missed(decode, cost, self.step(decode) / usual, step / usual)
        if decode.prefills and self.choice:
            lost += self.slowed(decode, self.output * usual_token)
        used = objectives_used(demand.slo, ttft, tpot, demand.output)
        displaced += self.displaced(decode) if not own and decode.prefills and self.choice else 0.0
        return PlainPair(decode, prefill, Prediction(*raw), demand.weight * chance - lost - passed - displaced, used)

    def beside(self, worker: Candidate, tpot: float | None) -> float:
        """What prompts as long as this one add to a decode step there."""
        cost, tokens = self.cost(worker), self.demand.tokens
        if not worker.prompt_share:
            return 0.0
        return cost.seconds(StepLoad.of(0, min(tokens, chunk_tokens(worker, cost, 0, tpot)))) - cost.fixed

    def slowed(self, worker: Candidate, lasts: float) -> float:
        """As router.decode_price says, with every chance computed."""
        cost, most = self.cost(worker), worker.status.max_batched_tokens or 512
        drift = self.calibration.first(worker.instance, self.urgency, both=worker.decodes)
        context = self.demand.tokens + self.output / 2
        rows = worker.decode_load + StepLoad(1, context, 1, context)
        objectives = [each for each in (worker.tightest_tpot, self.tpot) if each is not None]
        chunk = max(1, most - rows.new_tokens)
        if objectives:
            paced = cost.chunk_within(cost.pause_seconds(min(objectives)) / GAP, 0, rows, chunk)
            chunk = max(min(LEAST_CHUNK, chunk), paced)
        beside = (cost.seconds(rows) + cost.chunk_seconds(0, chunk) - cost.fixed) / chunk
        slower = beside / ((cost.fixed + cost.chunk_seconds(0, most) - cost.fixed) / most)
        late, error = 0.0, sqrt(drift.variance)
        for kind in worker.arrivals if slower > 1.0 else ():
            before = (backlog_seconds(worker, cost, self.now) + kind.seconds) * factor_of(drift)
            early = within(kind.limit, before, error)
            late += kind.rate * lasts * (early - within(kind.limit, before * slower, error))
        return PRICE * late / rows.sequences

    def first(self, worker: Candidate, tpot: float | None) -> tuple[float, float, float, float, float, float, float]:
        """Queue, compute, TTFT, its error, the chance that it is in time, the requests that are not because of it.

        And those that are not because of what its copy of a prefix displaces.

        `tpot`: the objective of the request where it decodes there too.
        """
        demand, cost, rows = self.demand, self.cost(worker), worker.decode_load
        start = demand.tokens - demand.uncached(worker)
        beside = cost.seconds(rows) - cost.fixed if rows.sequences else 0.0
        chunk = chunk_tokens(worker, cost, start, tpot)
        compute = cost.prompt_seconds(start, demand.tokens, chunk, beside=beside)
        prompt = QueuedPrompt(*demand.turn(self.now), compute)
        queue = queue_seconds(worker, cost, prompt, self.now)
        drift = self.calibration.first(worker.instance, self.urgency, both=worker.decodes)
        left = demand.first_token_in
        ttft, error = (queue + compute) * factor_of(drift), sqrt(drift.variance)
        chance = 1.0 if left is None else within(left, ttft, error)
        return queue, compute, ttft, error, chance, self.passed(worker, compute, queue, chance), self.displaced(worker)

    def passed(self, worker: Candidate, seconds: float, queue: float, chance: float) -> float:
        """Prompts that are late as this request takes so many seconds, `queue` seconds from now."""
        prompt = QueuedPrompt(*self.demand.turn(self.now), seconds)
        drift = self.calibration.first(worker.instance, self.urgency, both=worker.decodes)
        lost = queued_lost(worker, self.cost(worker), prompt, drift, self.now)
        return lost + newcomers_missed(worker, prompt, queue, drift, self.now, chance)

    def displaced(self, worker: Candidate) -> float:
        """Prompts that are late as others are computed again, where a prefix that another worker has comes to lie."""
        cached, able = self.demand.cached, {each.instance for each in self.view.prefill}
        known = max((tokens for each, tokens in cached.items() if each in able), default=0)
        seconds = DISPLACED * self.cost(worker).token * max(0, known - cached.get(worker.instance, 0))
        prompt = QueuedPrompt(*self.demand.turn(self.now), seconds)
        queue = queue_seconds(worker, self.cost(worker), prompt, self.now)
        return min(self.passed(worker, seconds, queue, 1.0), MOST_DISPLACED * self.demand.weight) if seconds else 0.0


def objectives_used(slo: Slo, ttft: float, tpot: float, output: int) -> float:
    """How much of both objectives it takes, 1 for all of one; seconds to the last token where one is not stated.

    Seconds alone would let a queue of a whole TTFT objective pass for a few per cent of a long answer.
    """
    if slo.ttft_ms and slo.tpot_ms:
        return 1e3 * (ttft / slo.ttft_ms + tpot / slo.tpot_ms)
    return ttft + tpot * max(0, output - 1)


def factor_of(drift: Drift) -> float:
    return min(3.0, max(1.0 / 3.0, exp(drift.mean)))


def newcomers_missed(
    worker: Candidate, prompt: QueuedPrompt, queue: float, drift: Drift, now: float, chance: float
) -> float:
    """As QueuePlace.newcomers_lost says, with every chance computed."""
    factor, error, lost = factor_of(drift), sqrt(drift.variance), 0.0
    waits, taken = queue * factor, prompt.seconds * factor
    for kind in worker.arrivals:
        if kind.priority < prompt.priority:
            continue
        alone, first, in_time = kind.seconds * factor, 0.0, 1.0
        if kind.priority == prompt.priority:
            due_in = prompt.due - now if prompt.due < inf else UNHURRIED
            first, in_time = max(0.0, due_in - kind.limit), chance
        behind = max(0.0, waits + taken - first)
        if behind and in_time > NEVER:
            early = within(kind.limit, waits + alone, error)
            lost += kind.rate * behind * in_time * (early - within(kind.limit, waits + alone + taken, error))
        if in_time < 1.0 - NEVER:
            early = within(kind.limit, alone, error)
            late = early - within(kind.limit, alone + taken, error)
            lost += kind.rate * taken * (1.0 - in_time) * LATE_SHARE * late
    return lost


def others_missed(worker: Candidate, cost: StepCost, before: float, after: float) -> float:
    """As router.predict.others_lost says, with every chance computed."""
    lost = 0.0
    for objective, count in worker.objectives:
        lost += count * (within(objective, before, cost.error) - within(objective, after, cost.error))
    return max(0.0, lost)
