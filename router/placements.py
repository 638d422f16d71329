"""A request's placements among the workers of a view: which are looked at, and what each of them is predicted to bring.

Pure. A choice has a millisecond: each worker is predicted for once, what pairs share is not computed for each of them,
and no prompt is predicted for where no shortlisted decode could use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from router.calibration import Calibration, urgency_of
from router.candidate import Candidate
from router.chances import LEAST_ERROR, within
from router.columns import KeptColumns
from router.decode_price import prompts_slowed
from router.policy import Considered, Demand, FleetView, spread
from router.predict import (
    KnownCosts,
    Prediction,
    QueuePlace,
    after_backlog,
    backlog_seconds,
    others_lost,
    step_seconds,
    token_seconds,
)
from router.prompt_steps import PromptSteps, prompt_steps
from router.shortlist import quickest_prompts, quickest_steps, quickest_texts, roomy
from serving.step_cost import StepCost

SHORTLIST = 4  # workers of each kind whose placements are predicted,
MIXED = 8  # and of mixed ones: how long their queues are is known only then
DISPLACED = 3.0  # times that KV counts which a copy displaces: who looks for it makes copies elsewhere
MOST_DISPLACED = 2.0  # times a request's weight that a copy counts at most, at each worker that it comes to

# A choice makes dozens of each of these: they are not frozen, which would double what making one takes.


@dataclass(slots=True)
class FirstToken:
    """A prompt at one worker: seconds, the corrected TTFT, and the chance that it is within its objective."""

    worker: Candidate
    queue: float
    compute: float
    ttft: float
    error: float
    chance: float
    lost: float  # prompts that miss their TTFT because this one passes them, or comes before them
    displaced: float  # and because a copy of its prefix stays there


@dataclass(slots=True)
class FurtherTokens:
    """A decode at one worker: seconds of a step and a token with the request in it, without a handoff."""

    worker: Candidate
    step: float
    token: float
    pause: float  # a token, while prompts that wait there now are computed beside it
    left: float  # until they all are
    held: float  # a token at most, as its objective holds prompts back
    factor: float  # by which its TPOT is corrected
    error: float
    alone: float | None  # a token in steps without prompts, where the worker holds prompts back for its objective
    risk: float  # the error of what decides if its TPOT is met: of that, or of its TPOT
    sure: float  # the sure_ratio of that
    lost: float  # requests that decode there and miss their TPOT because this one joins them
    displaced: float  # prompts that miss their TTFT because a copy of its prefix is handed over


class PredictedPlacement(NamedTuple):
    """`further` is None where a request needs no decode. The best are those with the least `behind`, then `used`.

    Of dozens that are found few are asked for more than these two: they are found as the plain tuples they are made of.
    """

    behind: float  # minus the score
    used: float  # of both its objectives, 1 for all of one; seconds to the last token where one is not stated
    first: FirstToken
    further: FurtherTokens | None
    transfer: float
    token: float
    tpot: float

    @property
    def prefill(self) -> Candidate:
        return self.first.worker

    @property
    def decode(self) -> Candidate | None:
        return self.further.worker if self.further is not None else None

    def spread(self, demand: Demand) -> tuple[int, int]:
        """Orders near ties, for each request otherwise."""
        return spread(demand, self.decode) if self.decode is not None else 0, spread(demand, self.prefill)


Scored = tuple[float, float, FirstToken, FurtherTokens | None, float, float, float]


def told(placed: Scored, urgency: int, due_in: float) -> Considered:
    behind, _, first, further, transfer, token, tpot = placed
    decode, step, error = "", 0.0, LEAST_ERROR
    if further is not None:
        decode, step, error = further.worker.status.name, further.step, further.error
    raw = first.queue, first.compute, transfer, step, token, first.ttft, tpot, first.error, error, urgency, due_in
    return Considered(first.worker.status.name, decode, Prediction(*raw), -behind)


class PlacementSearch:
    """One request's placements. `turn` is what workers order their queues by; `columns` are kept between requests."""

    def __init__(
        self,
        demand: Demand,
        view: FleetView,
        now: float,
        costs: KnownCosts,
        calibration: Calibration,
        turn: tuple[int, float],
        columns: KeptColumns | None = None,
    ):
        self.demand = demand
        self.view = view
        self.now = now
        self.costs = costs
        self.calibration = calibration
        self.turn = turn
        self.urgency = urgency_of(demand.slo)
        self.tpot = demand.slo.tpot_ms / 1e3 if demand.slo.tpot_ms is not None else None
        self.output = max(2, demand.output)
        # Seconds alone would let a queue of a whole TTFT objective pass for a few per cent of a long answer.
        slo = demand.slo
        self._objectives = (slo.ttft_ms, slo.tpot_ms) if slo.ttft_ms and slo.tpot_ms else None
        self.apart = calibration.apart(demand.texts)
        kept = columns or KeptColumns()
        self._prefills, self._decoders = kept.of(view.prefill), kept.of(view.decode)
        self._fed: dict[tuple[str, bool], list[Candidate]] = {}  # who computes prompts for decodes elsewhere, by kind
        self._context = demand.tokens + self.output / 2  # tokens, in the mean while it decodes
        places = self._prefills.places
        self._known = max((tokens for each, tokens in demand.cached.items() if each in places), default=0)
        self._queues: dict[str, QueuePlace] = {}  # by instance
        self._holder = self._first_holder()  # a shortlist goes by time alone: a copy may cost more than a queue
        self._untroubled = view.links.untroubled
        self._choice = False  # prompts and decodes can be given to different workers

    def placements(self) -> list[Scored]:
        """The shortlisted placements, on workers whose device holds the whole text and that have room, if any do.

        As the tuples that PredictedPlacement is of.
        """
        view, found = self.view, list[Scored]()
        if not view.decode:
            return [self._alone(first) for first in self._first_tokens(self._quickest(), None)]
        split, mixed = self._decodes()
        if (holder := self._holder) is not None and holder not in mixed and self._could_decode(holder):
            mixed = [*mixed, holder]
        # Two mixed workers compute no prompts for each other: among these alone nobody else's prompts are wanted.
        self._choice = bool(split) or not self._prefills.all_decode
        quickest, decodes = self._quickest() if self._choice else [], [*split, *mixed]
        owning = [decode for decode in decodes if decode.prefills and self._prefills.holds(decode)]
        own = dict(zip([worker.instance for worker in owning], self._first_tokens(owning, self.tpot), strict=True))
        apart = [self._apart_from(decode, quickest, decode.instance in own) for decode in decodes]
        others = {worker.instance: worker for workers in apart for worker in workers}
        elsewhere = dict(zip(others, self._first_tokens([*others.values()], None), strict=True))
        for further, workers in zip(self._further_tokens(decodes), apart, strict=True):
            firsts, its = [elsewhere[worker.instance] for worker in workers], own.get(further.worker.instance)
            self._pair(firsts if its is None else [*firsts, its], further, found)
        return found

    def _decodes(self) -> tuple[list[Candidate], list[Candidate]]:
        """Those shortlisted: of workers that only decode, and of mixed ones."""
        demand, workers, costs, now, columns = self.demand, self.view.decode, self.costs, self.now, self._decoders
        if columns.known and columns.roomy(demand):
            return columns.steps(SHORTLIST), columns.texts(demand, now, MIXED)
        able = roomy(demand, workers)
        split = quickest_steps([worker for worker in able if not worker.prefills], costs, SHORTLIST)
        return split, quickest_texts(demand, [worker for worker in able if worker.prefills], costs, now, MIXED)

    def _quickest(self) -> list[Candidate]:
        demand, columns, now, holder = self.demand, self._prefills, self.now, self._holder
        if columns.known and not columns.others:
            found = columns.prompts(demand, now, 2 * SHORTLIST)
        else:
            found = quickest_prompts(demand, self.view.prefill, self.costs, now, 2 * SHORTLIST)
        return found if holder is None else [holder, *(worker for worker in found if worker is not holder)]

    def _first_holder(self) -> Candidate | None:
        """Of those that have the most of the prompt, if any has some, the one whose prompts are computed first."""
        places, workers, known = self._prefills.places, self._prefills.workers, self._known
        if not known:
            return None
        most = [
            workers[places[each]] for each, cached in self.demand.cached.items() if cached == known and each in places
        ]
        now = self.now  # idle ones are alike, however long ago they were heard of
        return min(most, key=lambda worker: (max(now, worker.prompts_left_at), places[worker.instance]))

    def _could_decode(self, worker: Candidate) -> bool:
        """True for a mixed one of the view with room for the whole text."""
        return self._decoders.holds(worker) and worker.load < 1.0 and self.demand.tokens < worker.device_tokens

    def _apart_from(self, decode: Candidate, quickest: Sequence[Candidate], has_own: bool) -> Sequence[Candidate]:
        """Other workers that may compute the prompt for a decode by this one: the quickest, else any if it may not.

        Where no way is barred they are the same for all decodes of a kind.
        """
        both, generation, links = decode.prefills, decode.generation, self.view.links
        shared = self._untroubled and (both or not self._prefills.holds(decode))
        found = self._fed.get((generation, both)) if shared else None
        if found is None:
            found = [
                worker
                for worker in quickest
                if worker is not decode
                and worker.generation == generation
                and not (both and worker.decodes)
                and (shared or links.allows(worker.instance, decode.instance, self.now))
            ][:SHORTLIST]
            if shared:
                self._fed[generation, both] = found
        return found if found or has_own else self.view.prefills_for(decode, self.now)[:SHORTLIST]

    # ---- what is predicted: the same of all workers, then the next. The interpreter takes a seventh less time for what
    # it has just done than for all of one worker after all of another.

    def _first_tokens(self, workers: Sequence[Candidate], tpot: float | None) -> list[FirstToken]:
        """The prompt at each; `tpot` is its objective where it decodes there too, which holds prompts back."""
        costs = [self.costs.of(worker) for worker in workers]
        places = [self._place(worker, cost) for worker, cost in zip(workers, costs, strict=True)]
        return [self._first(place, cost, tpot) for place, cost in zip(places, costs, strict=True)]

    def _first(self, place: QueuePlace, cost: StepCost, tpot: float | None) -> FirstToken:
        worker, demand, drift = place.worker, self.demand, place.drift
        steps, left = prompt_steps(worker, cost, tpot), demand.first_token_in
        compute = steps.prompt_seconds(demand.cached.get(worker.instance, 0), demand.tokens)
        queue, error = place.queue_seconds(compute), drift.error
        ttft = (queue + compute) * drift.factor
        chance = 1.0 if left is None else within(left, ttft, error)
        lost, displaced = place.lost(compute, queue, chance), self._displaced(place, cost)
        return FirstToken(worker, queue, compute, ttft, error, chance, lost, displaced)

    def _place(self, worker: Candidate, cost: StepCost) -> QueuePlace:
        """The prompt's in this worker's queue."""
        found = self._queues.get(worker.instance)
        if found is None:
            drift = self.calibration.first(worker.instance, self.urgency, both=worker.decodes)
            found = self._queues[worker.instance] = QueuePlace(worker, cost, *self.turn, drift, self.now)
        return found

    def _displaced(self, place: QueuePlace, cost: StepCost) -> float:
        """Prompts that miss their TTFT because a copy of the request's prefix stays there, however it gets there.

        As if a prompt came that takes DISPLACED times what is lacking there. KV that nobody has must be kept somewhere:
        it costs the same wherever it is.
        """
        found = place.displaced
        if found is None:
            found, worker = 0.0, place.worker
            lacking = self._known - self.demand.cached.get(worker.instance, 0)
            if lacking > 0 and (worker.queued or worker.arrivals):
                compute = DISPLACED * cost.token * lacking
                lost = place.lost(compute, place.queue_seconds(compute), 1.0)
                found = min(lost, MOST_DISPLACED * self.demand.weight)
            place.displaced = found
        return found

    def _further_tokens(self, workers: Sequence[Candidate]) -> list[FurtherTokens]:
        """A decode at each, beside the prompts it computes."""
        tokens, output, tpot, now = self.demand.tokens, self.output, self.tpot, self.now
        costs = [self.costs.of(worker) for worker in workers]
        steps = [prompt_steps(worker, cost, tpot) for worker, cost in zip(workers, costs, strict=True)]
        taken = [step_seconds(worker, cost, tokens, output) for worker, cost in zip(workers, costs, strict=True)]
        found = [self._decoding(*each) for each in zip(workers, steps, taken, strict=True)]
        for further, each, cost in zip(found, steps, costs, strict=True):
            worker = further.worker
            if worker.prefills and self._choice:
                place, lasts = self._place(worker, cost), output * further.token
                further.lost += prompts_slowed(worker, each, self._context, lasts, place.drift, now)
                further.displaced = self._displaced(place, cost)
        return found

    def _decoding(self, worker: Candidate, steps: PromptSteps, step: float) -> FurtherTokens:
        """A decode at one, in steps of `step` seconds; not yet what prompts lose by it."""
        cost, instance, both = steps.cost, worker.instance, worker.prefills
        each = usual = self.calibration.tokens_a_step(instance)
        if self.apart:
            each = self.calibration.tokens_a_step(instance, self.apart)
        mean = token_seconds(worker, step, steps.beside_seconds(self.demand.tokens)) if worker.prompt_share else step
        held = steps.held_seconds(step / each) if both else inf
        token, left = min(held, mean / each), backlog_seconds(worker, cost, self.now)
        pause = steps.pause_seconds(step) / each if left else 0.0
        drift = self.calibration.further(instance, both=both)
        lost = others_lost(worker, steps, steps.decode / usual, step / usual)
        alone, risk, sure = (step / each, cost.error, steps.sure) if both else (None, drift.error, drift.sure)
        factor, error = drift.factor, drift.error
        return FurtherTokens(worker, step, token, pause, left, held, factor, error, alone, risk, sure, lost, 0.0)

    def _alone(self, first: FirstToken) -> Scored:
        """A request that needs no decode."""
        score = self.demand.weight * first.chance - first.lost - first.displaced
        return -score, first.ttft, first, None, 0.0, 0.0, 0.0

    def _pair(self, firsts: Sequence[FirstToken], further: FurtherTokens, found: list[Scored]) -> None:
        """A decode with each of the prefills for it. Errors of TTFT and TPOT are taken for independent."""
        decode, demand, limit, seconds = further.worker, self.demand, self.tpot, self.view.links.seconds
        weight, tokens, instance, later = demand.weight, demand.tokens, decode.instance, self.output - 1
        pause, sure, lost, alone = further.pause, further.sure, further.lost, further.alone
        objectives, output = self._objectives, max(0, demand.output - 1)
        # What differs between firsts is their handoff, and where it waits for prompts: else it is as at the last one.
        slower, handed = pause > further.token, -1.0
        token = tpot = used_later = 0.0
        met = 1.0  # the chance of its TPOT
        for first in firsts:
            worker, transfer, displaced = first.worker, 0.0, first.displaced
            if worker is not decode:
                displaced += further.displaced
                transfer = seconds(worker.instance, instance, tokens)
            if slower or transfer != handed:
                token, handed = further.token, transfer
                if slower:
                    begun = first.queue if worker is decode else first.queue + first.compute
                    token = min(further.held, after_backlog(token, pause, further.left - begun, later))
                token += transfer / later  # the handoff delays the second
                tpot, met = token * further.factor, 1.0
                if limit is not None:
                    judged = tpot if alone is None else alone + transfer / later
                    if not 0.0 < judged * sure <= limit:  # else it is certain
                        met = within(limit, judged, further.risk)
                used_later = tpot / objectives[1] if objectives is not None else tpot * output
            score = weight * (first.chance * met) - lost - first.lost - displaced
            used = (
                1e3 * (first.ttft / objectives[0] + used_later) if objectives is not None else first.ttft + used_later
            )
            found.append((-score, used, first, further, transfer, token, tpot))
