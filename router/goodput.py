"""The goodput policy: the placement that lets the most requests meet both their objectives, then the quickest.

    score(prefill, decode) = weight · P(the request meets both) − expected misses it causes among those that run

It predicts with the step costs that workers report; where none does it ranks as prefix-aware does. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from router.calibration import Calibration, Drift, urgency_of
from router.candidate import Candidate, QueuedPrompt
from router.policy import Considered, Decision, Demand, FleetView, PrefixAware, spread
from router.predict import (
    LEAST_ERROR,
    KnownCosts,
    Prediction,
    after_backlog,
    backlog_seconds,
    beside_seconds,
    held_seconds,
    newcomers_lost,
    objectives_used,
    others_lost,
    pause_seconds,
    prompt_seconds,
    queue_seconds,
    queued_lost,
    step_seconds,
    token_seconds,
    within,
)
from router.shortlist import quickest_prompts, quickest_steps, quickest_texts, roomy

SHORTLIST = 4  # workers of each kind whose placements are predicted
SCORE_BAND = 0.02  # requests: scores within it are near ties, and the placement with the most to spare wins
USED_BAND = 0.05  # share of what that uses: placements within it are near ties, and are spread over requests
LATE = 1.3  # of its TTFT objective: predictions learn nothing from how much later than that a first token was
KEPT = 8  # placements that a decision tells it has considered


# A choice makes dozens of each of these: they are not frozen, which would double what making one takes.


@dataclass(slots=True)
class _FirstToken:
    """A prompt at one worker: seconds, the corrected TTFT, and the chance that it is within its objective."""

    worker: Candidate
    queue: float
    compute: float
    ttft: float
    error: float
    chance: float
    lost: float  # prompts that miss their TTFT because this one passes them, or comes before them


@dataclass(slots=True)
class _FurtherTokens:
    """A decode at one worker: seconds of a step and a token with the request in it, without a handoff."""

    worker: Candidate
    step: float
    token: float
    pause: float  # a token, while prompts that wait there now are computed beside it
    left: float  # until they all are
    held: float  # a token at most, as its objective holds prompts back
    drift: Drift
    lost: float  # requests that decode there and miss their TPOT because this one joins them


@dataclass(slots=True)
class _Placement:
    """`further` is None where a request needs no decode."""

    first: _FirstToken
    further: _FurtherTokens | None
    transfer: float
    token: float
    tpot: float
    score: float
    used: float  # of its objectives, or seconds (objectives_used)

    @property
    def prefill(self) -> Candidate:
        return self.first.worker

    @property
    def decode(self) -> Candidate | None:
        return self.further.worker if self.further is not None else None

    def predicted(self, urgency: int, due_in: float) -> Prediction:
        first, further = self.first, self.further
        step, error = (further.step, further.drift.error) if further is not None else (0.0, LEAST_ERROR)
        raw = first.queue, first.compute, self.transfer, step, self.token
        return Prediction(*raw, first.ttft, self.tpot, first.error, error, urgency, due_in)

    def told(self, urgency: int, due_in: float) -> Considered:
        decode = self.further.worker.status.name if self.further is not None else ""
        return Considered(self.prefill.status.name, decode, self.predicted(urgency, due_in), self.score)

    def spread(self, demand: Demand) -> tuple[int, int]:
        """Orders near ties, for each request otherwise."""
        return spread(demand, self.decode) if self.decode is not None else 0, spread(demand, self.prefill)


class Goodput:
    """`calibration` corrects predictions by what came of earlier ones."""

    needs_prefixes: ClassVar[bool] = True

    def __init__(self, calibration: Calibration | None = None):
        self.calibration = calibration or Calibration()
        self.fallback = PrefixAware()

    def choose(self, demand: Demand, view: FleetView, now: float) -> Decision | None:
        costs = KnownCosts((*view.decode, *view.prefill))
        search = PlacementSearch(demand, view, now, costs, self.calibration, demand.turn(now))
        placements = search.placements() if costs.known else []
        if not placements:
            return self.fallback.choose(demand, view, now)
        placements.sort(key=_rank)
        worst = placements[0].score - SCORE_BAND * demand.weight
        near = [placed for placed in placements if placed.score >= worst]
        most = min([placed.used for placed in near]) * (1 + USED_BAND)
        tied = [placed for placed in near if placed.used <= most]
        chosen = min(tied, key=lambda placed: placed.spread(demand)) if len(tied) > 1 else tied[0]
        others = [placed for placed in placements[:KEPT] if placed is not chosen]
        reason = "slo" if len(near) < len(placements) else "tie" if len(tied) > 1 else "quickest"
        due_in = demand.first_token_in if demand.first_token_in is not None and demand.build is None else inf
        considered = tuple([placed.told(search.urgency, due_in) for placed in (chosen, *others[: KEPT - 1])])
        return Decision(chosen.decode, chosen.prefill, reason, considered[0].predicted, considered, demand.texts)

    def observed(
        self,
        decision: Decision,
        *,
        ttft: float | None = None,
        tpot: float | None = None,
        step_tokens: float | None = None,
    ) -> None:
        predicted = decision.predicted
        if predicted is None:
            return
        if ttft is not None and decision.prefill is not None:
            raw, latest = predicted.queue + predicted.prefill, LATE * predicted.due_in
            if ttft <= latest or predicted.ttft < latest:
                learned = min(ttft, latest)
                self.calibration.first_token(decision.prefill.status.instance, raw, learned, predicted.urgency)
        if tpot is not None and decision.decode is not None:
            self.calibration.further_tokens(decision.decode.status.instance, predicted.token, tpot)
        if step_tokens is not None and decision.decode is not None:
            self.calibration.steps_took(decision.decode.status.instance, step_tokens, decision.texts)


def _rank(placed: _Placement) -> tuple[float, float]:
    """The best first."""
    return -placed.score, placed.used


class PlacementSearch:
    """One request's placements among the workers of a view. `turn` is what workers order their queues by."""

    def __init__(
        self,
        demand: Demand,
        view: FleetView,
        now: float,
        costs: KnownCosts,
        calibration: Calibration,
        turn: tuple[int, float],
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
        self.apart = calibration.apart(demand.texts)

    def placements(self) -> list[_Placement]:
        """The shortlisted placements, on workers whose device holds the whole text and that have room, if any do."""
        demand, view, now, costs = self.demand, self.view, self.now, self.costs
        firsts = [self._first(worker) for worker in quickest_prompts(demand, view.prefill, costs, now, 2 * SHORTLIST)]
        if not view.decode:
            return [self._alone(first) for first in firsts]
        able = roomy(demand, view.decode)
        split = quickest_steps([worker for worker in able if not worker.prefills], costs, SHORTLIST)
        mixed = quickest_texts(demand, [worker for worker in able if worker.prefills], costs, now, SHORTLIST)
        found = []
        for decode in (*split, *mixed):
            further = self._further(decode)
            found += [self._pair(first, further) for first in self._firsts_for(decode, firsts)]
        return found

    def _firsts_for(self, decode: Candidate, firsts: Sequence[_FirstToken]) -> list[_FirstToken]:
        """The quickest prefills for a decode by this worker: its own where it prefills too, and some others."""
        instance, generation, allows = decode.instance, decode.generation, self.view.links.allows
        found = []
        for first in firsts:
            worker = first.worker
            apart = worker is not decode and not (decode.prefills and worker.decodes)
            if apart and worker.generation == generation and allows(worker.instance, instance, self.now):
                found.append(first)
                if len(found) == SHORTLIST:
                    break
        if decode.prefills and decode in self.view.prefill:
            found.append(self._first(decode, own=True))
        if found:
            return found
        return [self._first(worker) for worker in self.view.prefills_for(decode, self.now)[:SHORTLIST]]

    # ---- what is predicted -----------------------------------------------------------------------------------------

    def _first(self, worker: Candidate, *, own: bool = False) -> _FirstToken:
        """The prompt at this worker; `own`: it decodes there too, and its TPOT objective holds prompts back."""
        demand, cost = self.demand, self.costs.of(worker)
        start = demand.tokens - demand.uncached(worker)
        compute = prompt_seconds(worker, cost, start, demand.tokens, self.tpot if own else None)
        prompt = QueuedPrompt(*self.turn, compute)
        queue = queue_seconds(worker, cost, prompt, self.now)
        drift = self.calibration.first(worker.status.instance, self.urgency)
        ttft, error, left = (queue + compute) * drift.factor, drift.error, demand.first_token_in
        chance = 1.0 if left is None else within(left, ttft, error)
        lost = queued_lost(worker, cost, prompt, drift, self.now)
        lost += newcomers_lost(worker, prompt, queue, drift, self.now, chance)
        return _FirstToken(
            worker,
            queue,
            compute,
            ttft=ttft,
            error=error,
            chance=chance,
            lost=lost,
        )

    def _further(self, worker: Candidate) -> _FurtherTokens:
        """A decode at this worker, beside the prompts it computes."""
        tokens, cost = self.demand.tokens, self.costs.of(worker)
        step, prompt = step_seconds(worker, cost, tokens, self.output), beside_seconds(worker, cost, tokens, self.tpot)
        instance, now_step = worker.status.instance, self.costs.step_seconds(worker)
        each, usual = (self.calibration.tokens_a_step(instance, apart) for apart in (self.apart, 0.0))
        held = held_seconds(cost, step / each, self.tpot) if worker.prefills else inf
        mean = token_seconds(worker, step, prompt)
        token = min(held, mean / each)
        before = token_seconds(worker, now_step, beside_seconds(worker, cost, tokens))
        left = backlog_seconds(worker, cost, self.now)
        pause = pause_seconds(worker, cost, step, self.tpot) / each if left else 0.0
        drift = self.calibration.further(instance)
        alone, beside = (now_step / usual, step / usual), (before / usual, mean / usual)
        lost = others_lost(worker, cost, alone, beside, drift)
        return _FurtherTokens(worker, step, token, pause, left, held, drift, lost)

    def _alone(self, first: _FirstToken) -> _Placement:
        """A request that needs no decode."""
        return _Placement(first, None, 0.0, 0.0, 0.0, self.demand.weight * first.chance - first.lost, first.ttft)

    def _pair(self, first: _FirstToken, further: _FurtherTokens) -> _Placement:
        """The two errors are taken for independent."""
        prefill, decode, demand = first.worker, further.worker, self.demand
        transfer, begun, drift = 0.0, first.queue, further.drift
        if prefill is not decode:
            transfer = self.view.links.seconds(prefill.status.instance, decode.status.instance, demand.tokens)
            begun += first.compute
        tokens = self.output - 1
        token = min(further.held, after_backlog(further.token, further.pause, further.left - begun, tokens))
        token += transfer / tokens  # the handoff delays the second
        tpot = token * drift.factor
        chance = first.chance if self.tpot is None else first.chance * within(self.tpot, tpot, drift.error)
        score = demand.weight * chance - further.lost - first.lost
        used = objectives_used(demand.slo, first.ttft, tpot, demand.output)
        return _Placement(first, further, transfer, token, tpot, score, used)
