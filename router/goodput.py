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
from router.predict import Prediction, others_lost, prompt_seconds, queue_seconds, step_seconds
from serving.step_cost import StepCost

SHORTLIST = 6  # workers of each side whose pairs are predicted
SCORE_BAND = 0.02  # requests: scores within it are near ties, and the quickest placement wins
TIME_BAND = 0.05  # share of the quickest: placements within it are near ties, and are spread over requests
KEPT = 8  # placements that a decision tells it has considered


@dataclass(frozen=True, slots=True)
class _Scored:
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
        if any(worker.cost is None for worker in (*view.decode, *view.prefill)):
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

    def _spread(self, demand: Demand, placed: _Scored) -> int:
        return spread(demand, placed.prefill) ^ (spread(demand, placed.decode) if placed.decode is not None else 0)

    def _placements(self, demand: Demand, view: FleetView, now: float) -> list[_Scored]:
        """The shortlisted placements. Those whose device holds the whole text go before all others."""
        if not view.decode:
            able = nsmallest(SHORTLIST, view.prefill, key=lambda worker: self._first_token(demand, worker, now))
            return [self._score(demand, view, worker, None, now) for worker in able]
        fits = [worker for worker in view.decode if not demand.streams(worker)] or view.decode
        roomy = [worker for worker in fits if worker.load < 1.0] or fits
        decodes = self._decode_shortlist(demand, roomy, now)
        found = []
        for decode in decodes:
            able = view.prefills_for(decode, now)
            own = [worker for worker in able if worker is decode]
            others = (worker for worker in able if worker is not decode)
            best = nsmallest(SHORTLIST, others, key=lambda worker: self._first_token(demand, worker, now))
            found += [self._score(demand, view, prefill, decode, now) for prefill in own + best]
        return found

    def _decode_shortlist(self, demand: Demand, able: Sequence[Candidate], now: float) -> list[Candidate]:
        """The best of the workers that decode alone and of those that prefill too."""
        split = [worker for worker in able if not worker.prefills]
        mixed = [worker for worker in able if worker.prefills]
        by_step = nsmallest(SHORTLIST, split, key=_present_step)
        by_both = nsmallest(
            SHORTLIST, mixed, key=lambda w: self._first_token(demand, w, now) + demand.output * _present_step(w)
        )
        return by_step + by_both

    def _first_token(self, demand: Demand, worker: Candidate, now: float) -> float:
        """Seconds to the first token, roughly: what the shortlist is made by."""
        assert worker.cost is not None
        return queue_seconds(worker, now) + worker.cost.token * demand.uncached(worker)

    def _score(
        self, demand: Demand, view: FleetView, prefill: Candidate, decode: Candidate | None, now: float
    ) -> _Scored:
        predicted, lost = self._predict(demand, view, prefill, decode, now)
        score = demand.weight * predicted.attainment(demand.slo, demand.first_token_in) - lost
        seconds = predicted.ttft + predicted.tpot * max(0, demand.output - 1)
        return _Scored(prefill, decode, predicted, score, seconds)

    def _predict(
        self, demand: Demand, view: FleetView, prefill: Candidate, decode: Candidate | None, now: float
    ) -> tuple[Prediction, float]:
        """What the placement brings the request, and how many others it is expected to cost their TPOT objective."""
        cost = prefill.cost
        assert cost is not None
        own = decode is prefill
        tpot_slo = demand.slo.tpot_ms / 1e3 if own and demand.slo.tpot_ms is not None else None
        start = demand.tokens - demand.uncached(prefill)
        queue = queue_seconds(prefill, now)
        compute = prompt_seconds(prefill, cost, start, demand.tokens, tpot_slo)
        known = self.calibration.of(prefill.status.instance, decode.status.instance if decode is not None else "")
        ttft = known.ttft(queue + compute)
        step = token = transfer = lost = 0.0
        if decode is not None:
            step, token, transfer, lost = self._decoding(demand, view, prefill, decode, compute)
        return Prediction(queue, compute, transfer, step, token, ttft, known.tpot(token), known.error), lost

    def _decoding(
        self, demand: Demand, view: FleetView, prefill: Candidate, decode: Candidate, compute: float
    ) -> tuple[float, float, float, float]:
        """Seconds of a step, a token and the handoff, and expected misses among those that run there."""
        cost = decode.cost
        assert cost is not None
        output = max(2, demand.output)
        step = step_seconds(decode, cost, demand.tokens, output)
        before, after = _step_now(decode, cost), step
        if decode is prefill:
            transfer, left = 0.0, 1.0 - decode.prompt_share
            before, after = before / left, step / left + compute / output  # its prompt holds them up meanwhile
            tpot = step / left
        else:
            left = 1.0 - decode.prompt_share
            transfer = view.links.seconds(prefill.status.instance, decode.status.instance, demand.tokens)
            tpot = step / left + transfer / (output - 1)
        return step, tpot, transfer, others_lost(decode, before, after, cost.error)


def _step_now(worker: Candidate, cost: StepCost) -> float:
    return cost.seconds(worker.decode_load)


def _present_step(worker: Candidate) -> float:
    assert worker.cost is not None
    return _step_now(worker, worker.cost)
