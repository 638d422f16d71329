"""The goodput policy: the placement that lets the most requests meet both their objectives, then the quickest.

    score(prefill, decode) = weight · P(the request meets both) − expected misses it causes among others

Others are those that run or wait, and prompts that are likely to come (router.predict, router.decode_price).

It predicts with the step costs that workers report; where none does it ranks as prefix-aware does. Pure.
"""

from __future__ import annotations

from math import inf
from operator import itemgetter
from typing import ClassVar

from router.calibration import Calibration
from router.candidate import Candidate
from router.columns import KeptColumns
from router.placements import PlacementSearch, PredictedPlacement, told
from router.policy import Decision, Demand, FleetView, PrefixAware
from router.predict import KnownCosts

SCORE_BAND = 0.02  # requests: scores within it are near ties, and the placement with the most to spare wins
USED_BAND = 0.05  # share of what that uses: placements within it are near ties, and are spread over requests
LATE = 1.3  # of its TTFT objective: predictions learn nothing from how much later than that a first token was
KEPT = 8  # placements that a decision tells it has considered

_best_first = itemgetter(0, 1)  # `behind` and `used` of a PredictedPlacement: the highest score, then the least used


class Goodput:
    """`calibration` corrects predictions by what came of earlier ones."""

    needs_prefixes: ClassVar[bool] = True

    def __init__(self, calibration: Calibration | None = None):
        self.calibration = calibration or Calibration()
        self.fallback = PrefixAware()
        self.columns = KeptColumns()

    def choose(self, demand: Demand, view: FleetView, now: float) -> Decision | None:
        costs = KnownCosts(view.decode, view.prefill)
        search = PlacementSearch(demand, view, now, costs, self.calibration, demand.turn(now), self.columns)
        placements = search.placements() if costs.known else []
        if not placements:
            return self.fallback.choose(demand, view, now)
        placements.sort(key=_best_first)
        worst = -placements[0][0] - SCORE_BAND * demand.weight
        near = [placed for placed in placements if -placed[0] >= worst]
        most = min([placed[1] for placed in near]) * (1 + USED_BAND)
        tied = [placed for placed in near if placed[1] <= most]
        best = min(tied, key=lambda placed: PredictedPlacement(*placed).spread(demand)) if len(tied) > 1 else tied[0]
        chosen = PredictedPlacement(*best)
        reason = "slo" if len(near) < len(placements) else "tie" if len(tied) > 1 else "quickest"
        due_in = demand.first_token_in if demand.first_token_in is not None and demand.build is None else inf
        others = [placed for placed in placements[:KEPT] if placed is not best][: KEPT - 1]
        considered = tuple([told(placed, search.urgency, due_in) for placed in (best, *others)])
        predicted, decode = considered[0].predicted, chosen.decode
        if predicted is not None and decode is not None:
            beside, both = decode.held_leases, decode.prefills
            predicted.usual_tpot = self.calibration.usual_tpot(beside, predicted.tpot, both=both)
        return Decision(decode, chosen.prefill, reason, predicted, considered, demand.texts)

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
        prefill, decode = decision.prefill, decision.decode
        if ttft is not None and prefill is not None and not _guessed(prefill):
            raw, latest = predicted.queue + predicted.prefill, LATE * predicted.due_in
            if ttft <= latest or predicted.ttft < latest:
                learned, urgency = min(ttft, latest), predicted.urgency
                self.calibration.first_token(prefill.instance, raw, learned, urgency, both=prefill.decodes)
        if tpot is not None and decode is not None and not _guessed(decode):
            self.calibration.further_tokens(decode.instance, predicted.token, tpot, both=decode.prefills)
            self.calibration.text_took(decode.held_leases, predicted.tpot, tpot, both=decode.prefills)
        if step_tokens is not None and decision.decode is not None:
            self.calibration.steps_took(decision.decode.status.instance, step_tokens, decision.texts)


def _guessed(worker: Candidate) -> bool:
    """True if its step cost was a guess made before any step: how far off that is says nothing of later predictions."""
    return worker.cost is not None and not worker.cost.samples
