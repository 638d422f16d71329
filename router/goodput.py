"""The goodput policy: the placement that lets the most requests meet both their objectives, then the quickest.

    score(prefill, decode) = weight · P(the request meets both) − expected misses it causes among those that run

It predicts with the step costs that workers report. Without those it ranks as prefix-aware does. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import ClassVar

from router.calibration import Calibration
from router.candidate import Candidate
from router.policy import Considered, Decision, Demand, FleetView, PrefixAware, spread
from router.predict import (
    Prediction,
    chunk_tokens,
    others_lost,
    prompt_seconds,
    queue_seconds,
    step_seconds,
    token_seconds,
)
from router.shortlist import quickest_prompts, quickest_steps, quickest_texts, roomy
from serving.messages import Slo

SHORTLIST = 4  # workers of each kind whose placements are predicted
SCORE_BAND = 0.02  # requests: scores within it are near ties, and the quickest placement wins
TIME_BAND = 0.05  # share of the quickest: placements within it are near ties, and are spread over requests
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
    seconds: float  # predicted from now to the last token

    def told(self) -> Considered:
        decode = self.decode.status.name if self.decode is not None else ""
        return Considered(self.prefill.status.name, decode, self.predicted, self.score)


class Goodput:
    """`calibration` corrects predictions by what came of earlier ones."""

    needs_prefixes: ClassVar[bool] = True

    def __init__(self, calibration: Calibration | None = None):
        self.calibration = calibration or Calibration()
        self.fallback = PrefixAware()

    def choose(self, demand: Demand, view: FleetView, now: float) -> Decision | None:
        if any(worker.cost is None for worker in view.decode) or any(worker.cost is None for worker in view.prefill):
            return self.fallback.choose(demand, view, now)
        placements = self._placements(demand, view, now)
        if not placements:
            return self.fallback.choose(demand, view, now)
        best = max(placed.score for placed in placements)
        near = [placed for placed in placements if placed.score >= best - SCORE_BAND * demand.weight]
        quickest = min(placed.seconds for placed in near)
        tied = [placed for placed in near if placed.seconds <= quickest * (1 + TIME_BAND)]
        chosen = min(tied, key=lambda placed: self._spread(demand, placed))
        others = nsmallest(KEPT - 1, (p for p in placements if p is not chosen), key=lambda p: (-p.score, p.seconds))
        reason = "slo" if len(near) < len(placements) else "tie" if len(tied) > 1 else "quickest"
        considered = tuple(placed.told() for placed in (chosen, *others))
        return Decision(chosen.decode, chosen.prefill, reason, chosen.predicted, considered)

    def observed(self, decision: Decision, *, ttft: float | None = None, tpot: float | None = None) -> None:
        predicted = decision.predicted
        if predicted is None:
            return
        if ttft is not None and decision.prefill is not None:
            self.calibration.first_token(decision.prefill.status.instance, predicted.queue + predicted.prefill, ttft)
        if tpot is not None and decision.decode is not None:
            self.calibration.further_tokens(decision.decode.status.instance, predicted.token, tpot)

    def _spread(self, demand: Demand, placed: _Placement) -> tuple[int, int]:
        decode = spread(demand, placed.decode) if placed.decode is not None else 0
        return decode, spread(demand, placed.prefill)

    # ---- what is looked at -----------------------------------------------------------------------------------------

    def _placements(self, demand: Demand, view: FleetView, now: float) -> list[_Placement]:
        """The shortlisted placements, on workers whose device holds the whole text and that have room, if any do."""
        quick = quickest_prompts(demand, view.prefill, now, 2 * SHORTLIST)
        firsts = [self._first(demand, worker, now) for worker in quick]
        if not view.decode:
            return [self._alone(demand, first) for first in firsts]
        able = roomy(demand, view.decode)
        split = quickest_steps([worker for worker in able if not worker.prefills], SHORTLIST)
        mixed = quickest_texts(demand, [worker for worker in able if worker.prefills], now, SHORTLIST)
        found = []
        for decode in (*split, *mixed):
            further = self._further(demand, decode)
            beside = self._firsts_for(demand, view, decode, firsts, now)
            found += [self._pair(demand, view, first, further) for first in beside]
        return found

    def _firsts_for(
        self, demand: Demand, view: FleetView, decode: Candidate, firsts: Sequence[_FirstToken], now: float
    ) -> list[_FirstToken]:
        """The quickest prefills for a decode by this worker: its own where it prefills too, and some others."""
        instance, pairing = decode.status.instance, decode.status.pairing
        found = []
        for first in firsts:
            status = first.worker.status
            apart = first.worker is not decode and not (decode.prefills and first.worker.decodes)
            if apart and status.pairing == pairing and view.links.allows(status.instance, instance, now):
                found.append(first)
            if len(found) == SHORTLIST:
                break
        if decode.prefills and decode in view.prefill:
            found.append(self._first(demand, decode, now, own=True))
        if found:
            return found
        return [self._first(demand, worker, now) for worker in view.prefills_for(decode, now)[:SHORTLIST]]

    # ---- what is predicted -----------------------------------------------------------------------------------------

    def _first(self, demand: Demand, worker: Candidate, now: float, *, own: bool = False) -> _FirstToken:
        """The prompt at this worker; `own`: it decodes there too, and its TPOT objective holds prompts back."""
        cost, tpot_ms = worker.cost, demand.slo.tpot_ms
        assert cost is not None
        queue = queue_seconds(worker, now)
        start = demand.tokens - demand.uncached(worker)
        objective = tpot_ms / 1e3 if own and tpot_ms is not None else None
        compute = prompt_seconds(worker, cost, start, demand.tokens, objective)
        drift = self.calibration.first(worker.status.instance)
        added, ttft = cost.added_seconds(start, demand.tokens), (queue + compute) * drift.factor
        return _FirstToken(worker, queue, compute, added, ttft, drift.error)

    def _further(self, demand: Demand, worker: Candidate) -> _FurtherTokens:
        """A decode at this worker, beside the prompts it computes."""
        cost = worker.cost
        assert cost is not None
        step, now = step_seconds(worker, cost, demand.tokens, max(2, demand.output)), worker.step_seconds
        chunk = min(demand.tokens, chunk_tokens(worker, cost, 0, None)) if worker.prompt_share else 0
        token, before = (token_seconds(worker, cost, each, chunk) for each in (step, now))
        drift = self.calibration.further(worker.status.instance)
        lost = others_lost(worker, before * drift.factor, token * drift.factor, drift.error)
        return _FurtherTokens(worker, step, token, before, drift.factor, drift.error, lost)

    def _alone(self, demand: Demand, first: _FirstToken) -> _Placement:
        """A request that needs no decode."""
        predicted = Prediction(first.queue, first.compute, 0.0, 0.0, 0.0, first.ttft, 0.0, first.error)
        score = demand.weight * predicted.attainment(Slo(), demand.first_token_in)
        return _Placement(first.worker, None, predicted, score, first.ttft)

    def _pair(self, demand: Demand, view: FleetView, first: _FirstToken, further: _FurtherTokens) -> _Placement:
        prefill, decode = first.worker, further.worker
        output, transfer, lost, factor = max(2, demand.output), 0.0, further.lost, further.factor
        if prefill is decode:
            after = further.token + first.added / output  # what its prompt adds to their steps
            lost = others_lost(decode, further.before * factor, after * factor, further.error)
        else:
            transfer = view.links.seconds(prefill.status.instance, decode.status.instance, demand.tokens)
        token = further.token + transfer / (output - 1)
        tpot, error = token * factor, max(first.error, further.error)
        predicted = Prediction(first.queue, first.compute, transfer, further.step, token, first.ttft, tpot, error)
        score = demand.weight * predicted.attainment(demand.slo, demand.first_token_in) - lost
        return _Placement(prefill, decode, predicted, score, first.ttft + tpot * max(0, demand.output - 1))
