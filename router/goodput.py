"""The goodput policy: the placement that lets the most requests meet both their objectives, then the quickest.

    score(prefill, decode) = weight · P(the request meets both) − expected misses it causes among those that run

It predicts with the step costs that workers report; where none does it ranks as prefix-aware does. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import ClassVar

from router.calibration import Calibration, urgency_of
from router.candidate import Candidate, QueuedPrompt
from router.policy import Considered, Decision, Demand, FleetView, PrefixAware, spread
from router.predict import (
    KnownCosts,
    Prediction,
    chunk_tokens,
    others_lost,
    prompt_seconds,
    queue_seconds,
    queued_lost,
    step_seconds,
    token_seconds,
)
from router.shortlist import quickest_prompts, quickest_steps, quickest_texts, roomy
from serving.messages import Slo

SHORTLIST = 4  # workers of each kind whose placements are predicted
SCORE_BAND = 0.02  # requests: scores within it are near ties, and the placement with the most to spare wins
USED_BAND = 0.05  # share of what that uses: placements within it are near ties, and are spread over requests
KEPT = 8  # placements that a decision tells it has considered


@dataclass(frozen=True, slots=True)
class _FirstToken:
    """A prompt at one worker: seconds, and the corrected TTFT."""

    worker: Candidate
    queue: float
    compute: float
    added: float  # to the steps of what decodes there
    ttft: float
    error: float
    lost: float  # prompts that miss their TTFT because this one passes them


@dataclass(frozen=True, slots=True)
class _FurtherTokens:
    """A decode at one worker: seconds of a step and a token with the request in it, without a handoff."""

    worker: Candidate
    step: float
    token: float
    before: float  # a token, without the request
    factor: float  # of the correction
    error: float
    lost: float  # requests that decode there, where another worker prefills


@dataclass(frozen=True, slots=True)
class _Placement:
    prefill: Candidate
    decode: Candidate | None
    predicted: Prediction
    score: float
    used: float  # of its objectives, or seconds (Prediction.used)

    def told(self) -> Considered:
        decode = self.decode.status.name if self.decode is not None else ""
        return Considered(self.prefill.status.name, decode, self.predicted, self.score)

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
        best = max(placed.score for placed in placements)
        near = [placed for placed in placements if placed.score >= best - SCORE_BAND * demand.weight]
        least = min(placed.used for placed in near)
        tied = [placed for placed in near if placed.used <= least * (1 + USED_BAND)]
        chosen = min(tied, key=lambda placed: placed.spread(demand))
        others = nsmallest(KEPT - 1, (p for p in placements if p is not chosen), key=lambda p: (-p.score, p.used))
        reason = "slo" if len(near) < len(placements) else "tie" if len(tied) > 1 else "quickest"
        considered = tuple(placed.told() for placed in (chosen, *others))
        return Decision(chosen.decode, chosen.prefill, reason, chosen.predicted, considered)

    def observed(self, decision: Decision, *, ttft: float | None = None, tpot: float | None = None) -> None:
        predicted = decision.predicted
        if predicted is None:
            return
        if ttft is not None and decision.prefill is not None:
            raw = predicted.queue + predicted.prefill
            self.calibration.first_token(decision.prefill.status.instance, raw, ttft, predicted.urgency)
        if tpot is not None and decision.decode is not None:
            self.calibration.further_tokens(decision.decode.status.instance, predicted.token, tpot)


@dataclass(frozen=True, slots=True)
class PlacementSearch:
    """One request's placements among the workers of a view."""

    demand: Demand
    view: FleetView
    now: float
    costs: KnownCosts
    calibration: Calibration
    turn: tuple[int, float]  # what workers order their queues by

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
        instance, pairing, view = decode.status.instance, decode.status.pairing, self.view
        found = []
        for first in firsts:
            status = first.worker.status
            apart = first.worker is not decode and not (decode.prefills and first.worker.decodes)
            if apart and status.pairing == pairing and view.links.allows(status.instance, instance, self.now):
                found.append(first)
            if len(found) == SHORTLIST:
                break
        if decode.prefills and decode in view.prefill:
            found.append(self._first(decode, own=True))
        if found:
            return found
        return [self._first(worker) for worker in view.prefills_for(decode, self.now)[:SHORTLIST]]

    # ---- what is predicted -----------------------------------------------------------------------------------------

    def _first(self, worker: Candidate, *, own: bool = False) -> _FirstToken:
        """The prompt at this worker; `own`: it decodes there too, and its TPOT objective holds prompts back."""
        demand, cost = self.demand, self.costs.of(worker)
        start = demand.tokens - demand.uncached(worker)
        objective = demand.slo.tpot_ms / 1e3 if own and demand.slo.tpot_ms is not None else None
        compute = prompt_seconds(worker, cost, start, demand.tokens, objective)
        prompt = QueuedPrompt(*self.turn, compute)
        queue = queue_seconds(worker, cost, prompt, self.now)
        drift = self.calibration.first(worker.status.instance, urgency_of(demand.slo))
        added, ttft = cost.added_seconds(start, demand.tokens), (queue + compute) * drift.factor
        lost = queued_lost(worker, cost, prompt, drift, self.now)
        return _FirstToken(worker, queue, compute, added, ttft, drift.error, lost)

    def _further(self, worker: Candidate) -> _FurtherTokens:
        """A decode at this worker, beside the prompts it computes."""
        demand, cost = self.demand, self.costs.of(worker)
        step, now = step_seconds(worker, cost, demand.tokens, max(2, demand.output)), cost.seconds(worker.decode_load)
        chunk = min(demand.tokens, chunk_tokens(worker, cost, 0, None)) if worker.prompt_share else 0
        token, before = (token_seconds(worker, cost, each, chunk) for each in (step, now))
        drift = self.calibration.further(worker.status.instance)
        lost = others_lost(worker, before * drift.factor, token * drift.factor, drift.error)
        return _FurtherTokens(worker, step, token, before, drift.factor, drift.error, lost)

    def _alone(self, first: _FirstToken) -> _Placement:
        """A request that needs no decode."""
        demand = self.demand
        urgency = urgency_of(demand.slo)
        predicted = Prediction(first.queue, first.compute, 0.0, 0.0, 0.0, first.ttft, 0.0, first.error, urgency=urgency)
        score = demand.weight * predicted.attainment(Slo(), demand.first_token_in) - first.lost
        return _Placement(first.worker, None, predicted, score, first.ttft)

    def _pair(self, first: _FirstToken, further: _FurtherTokens) -> _Placement:
        prefill, decode, demand = first.worker, further.worker, self.demand
        output, transfer, lost, factor = max(2, demand.output), 0.0, further.lost, further.factor
        if prefill is decode:
            after = further.token + first.added / output  # what its prompt adds to their steps
            lost = others_lost(decode, further.before * factor, after * factor, further.error)
        else:
            transfer = self.view.links.seconds(prefill.status.instance, decode.status.instance, demand.tokens)
        token = further.token + transfer / (output - 1)
        predicted = Prediction(
            queue=first.queue,
            prefill=first.compute,
            transfer=transfer,
            step=further.step,
            token=token,
            ttft=first.ttft,
            tpot=token * factor,
            error=first.error,
            tpot_error=further.error,
            urgency=urgency_of(demand.slo),
        )
        score = demand.weight * predicted.attainment(demand.slo, demand.first_token_in) - lost - first.lost
        return _Placement(prefill, decode, predicted, score, predicted.used(demand.slo, demand.output))
